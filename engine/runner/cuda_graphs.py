"""CUDA graph capture."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


class CudaCapture:
    """`GraphCapture` by CUDA. All graphs share one memory pool, as only one of them runs at a time.

    Captures and warm-ups share one stream: cuBLAS keeps a workspace for each stream that it was ever used on,
    32 MiB on Hopper.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: reuse a stream instead of creating one."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.bytes_taken = 0

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        # A capture releases the allocator's cached blocks: release them now, or they hide what the graph
        # takes.
        torch.cuda.empty_cache()
        free = self._free()
        self._warm_up(body)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # a capture that fails to end leaves its stream current
            self._record(graph, body)
        self.bytes_taken += max(0, free - self._free())
        return graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, body: Callable[[], None]) -> None:
        # Other threads of the process (watchdogs, copies) may call CUDA meanwhile.
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with capturing:
                body()
        except BaseException:
            self._end_allocation()
            raise

    def _end_allocation(self) -> None:
        """End the allocation to the pool after a failed capture. Where CUDA refuses to end a capture, torch
        does not reset its allocator, which would then free no memory and fail at the next shortage.
        """
        cuda: Any = torch._C  # noqa: SLF001 - torch's own graph trees call it
        with suppress(RuntimeError, AttributeError):  # it has ended already
            cuda._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # noqa: SLF001

    def _warm_up(self, body: Callable[[], None]) -> None:
        """Run once outside the capture: kernels are compiled and libraries allocate their workspaces."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            body()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]
