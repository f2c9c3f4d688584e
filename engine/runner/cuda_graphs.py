"""CUDA graph capture."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

from ..planning.memory_model import capture_sizes

log = logging.getLogger(__name__)

WANTED: Final = 16
"""Steps of a size after which its graph is captured even though the engine is never idle."""
NEAR: Final = 2
"""Largest ratio of graph size to rows: padding is cheap, as decoding mostly reads weights."""


class GraphSize(NamedTuple):
    """Graph of a decoding step."""

    rows: int
    is_adapted: bool
    """True for steps in which rows have an adapter."""


class DecodeGraphs:
    """Graphs of `body(size)`, a step of `size` rows whose inputs and outputs have fixed addresses.

    The largest graph is captured first, as smaller ones then reuse the memory of its pool.
    """

    def __init__(
        self,
        capture: "CudaCapture",
        body: Callable[[int], None],
        most: int,
        budget_bytes: int,
        *,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """`most`: rows of the largest step. Capturing ends once `budget_bytes` are used up.

        `agree`: with other ranks that capture the same graph at the same time, return whether all succeeded:
        NCCL's collectives must be in a graph on all ranks or on none.
        """
        self._agree = agree
        self._capture = capture
        self._budget = budget_bytes
        self._body = body
        self._sizes = capture_sizes(most)
        self._replays: dict[int, Callable[[], None]] = {}
        self._wanted: Counter[int] = Counter()
        self._usable = True

    @property
    def next_size(self) -> int | None:
        """Size to capture next: the largest, then in ascending order."""
        if not self._may_capture:
            return None
        left = [size for size in self._sizes if size not in self._replays]
        return left[-1] if left == self._sizes else next(iter(left), None)

    @property
    def bytes_taken(self) -> int:
        return self._capture.bytes_taken

    def size_for(self, rows: int) -> int | None:
        """Return the size of the graph to pad to; None: run eagerly."""
        exact = next((size for size in self._sizes if size >= rows), None)
        if exact is None or not self._usable:
            return None
        if exact not in self._replays:
            self._wanted[exact] += 1
        return next((size for size in sorted(self._replays) if exact <= size <= NEAR * exact), None)

    @property
    def urgent_size(self) -> int | None:
        """Size that at least `WANTED` steps needed and that has no graph yet."""
        if not self._may_capture:
            return None
        often = (size for size, count in self._wanted.items() if count >= WANTED)
        return next((size for size in often if size not in self._replays), None)

    @property
    def _may_capture(self) -> bool:
        return self._usable and self._capture.bytes_taken < self._budget

    def capture(self, size: int) -> None:
        """Capture the graph of `size` rows. The inputs must name padding rows, as the warm-up writes KV.

        A failure turns graphs off on all ranks and has no other effect. Only a failure of a multi-rank
        warm-up raises: the other ranks wait for its collectives.
        """
        replay, problem = self._try(size)
        agreed = self._agree is None or self._agree(replay is not None)
        if replay is not None and agreed:
            self._replays[size] = replay
            return
        self._usable = False
        self._replays.clear()
        log.warning("CUDA graphs are off: capturing %d rows failed: %s", size, problem)

    def _try(self, size: int) -> tuple[Callable[[], None] | None, object]:
        """Capture one size: return its replay or None, and the reason to log where it is not used."""
        warm = False

        def body() -> None:
            nonlocal warm
            self._body(size)
            warm = True

        try:
            return self._capture.capture(body), "another rank could not"
        except Exception as error:  # drivers and compilers; everything works without graphs
            if self._agree is not None and not warm:
                raise
            return None, error

    def has(self, size: int) -> bool:
        return size in self._replays

    def replay(self, size: int) -> None:
        self._replays[size]()


class CudaCapture:
    """Capture of CUDA graphs. All graphs share one memory pool, as only one of them runs at a time.

    Captures and warm-ups share one stream: cuBLAS keeps a workspace for each stream that it was ever used on,
    32 MiB on Hopper.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: reuse a stream instead of creating one."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.bytes_taken = 0
        """Device memory of all graphs so far."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` once to warm up, then capture it; return its replay, which reuses inputs and outputs."""
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
