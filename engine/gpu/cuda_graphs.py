"""Graph capture by CUDA."""

from collections.abc import Callable

import torch


class CudaCapture:
    """All graphs share one pool of memory, as only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self.bytes_taken = 0

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        free = self._free()
        self._warm_up(body)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process (watchdogs, copies) may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            body()
        self.bytes_taken += max(0, free - self._free())
        return graph.replay

    def _warm_up(self, body: Callable[[], None]) -> None:
        """On a stream of its own: kernels are compiled and libraries take their workspaces."""
        current = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            body()
        current.wait_stream(side)
        torch.cuda.synchronize(self._device)

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]
