"""CUDA graph capture."""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ..planning.memory_model import capture_sizes

log = logging.getLogger(__name__)

EARLY: Final = 1, 2, 4, 8, 16, 32, 64
"""Sizes to capture first after the largest: with them every step of up to 64 rows has a graph near it."""
WANTED: Final = 16
"""Steps of a size after which its graph is captured even though the engine is never idle."""
NEAR: Final = 2
"""Largest ratio of graph size to rows: padding is cheap, as decoding mostly reads weights."""


class GraphSize(NamedTuple):
    """Graph of a decoding step."""

    rows: int
    is_adapted: bool
    """True for steps in which rows have an adapter."""
    is_warm: bool = False
    """True if a step of this size has just run without a graph, so that the capture waits for nothing."""


Body = Callable[[int], None]


class DecodeGraphs:
    """Graphs of `body(size)`, a step of `size` rows whose inputs and outputs have fixed addresses, and of
    `draw(size)`, which ends those steps that need nothing else to sample.

    The largest graph is captured first, as smaller ones then reuse the memory of its pool.
    """

    def __init__(
        self,
        capture: "CudaCapture",
        body: Body,
        most: int,
        budget_bytes: int,
        *,
        draw: Body | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """`most`: rows of the largest step. Capturing ends once `budget_bytes` are used up.

        `agree`: with other ranks that capture the same graph at the same time, return whether all succeeded:
        NCCL's collectives must be in a graph on all ranks or on none.
        """
        self._agree = agree
        self._capture = capture
        self._budget = budget_bytes
        self._body, self._draw = body, draw
        self._sizes = capture_sizes(most)
        self._replays: dict[int, list[Callable[[], None]]] = {}
        self._wanted: Counter[int] = Counter()
        self._usable = True
        self.urgent_size: int | None = None
        """Size of the last step if at least `WANTED` steps needed its graph: to capture right after it."""

    @property
    def next_size(self) -> int | None:
        """Size to capture next: the largest, then those of `EARLY`, then in ascending order."""
        if not self._may_capture:
            return None
        left = [size for size in self._sizes if size not in self._replays]
        if left == self._sizes:
            return left[-1]
        return next((size for size in EARLY if size in left), next(iter(left), None))

    @property
    def early_size(self) -> int | None:
        """Size to capture while the model loads; None if it can wait."""
        size = self.next_size
        return size if size in EARLY or not self._replays else None

    @property
    def bytes_taken(self) -> int:
        return self._capture.bytes_taken

    def size_for(self, rows: int) -> int | None:
        """Return the size to pad to; None: run without padding. A step whose graph is wanted runs at its size
        without a graph, which warms the capture up.
        """
        self.urgent_size = None
        exact = next((size for size in self._sizes if size >= rows), None)
        if exact is None or not self._usable:
            return None
        if exact not in self._replays:
            self._wanted[exact] += 1
            if self._wanted[exact] >= WANTED and self._may_capture:
                self.urgent_size = exact
                return exact
        return next((size for size in sorted(self._replays) if exact <= size <= NEAR * exact), None)

    @property
    def _may_capture(self) -> bool:
        return self._usable and self._capture.bytes_taken < self._budget

    def capture(self, size: int, *, is_warm: bool = False) -> None:
        """Capture the graph of `size` rows. The inputs must name padding rows, as the warm-up writes KV.
        `is_warm`: as of `GraphSize`.

        A failure turns graphs off on all ranks and has no other effect. Only a failure of a multi-rank
        warm-up raises: the other ranks wait for its collectives.
        """
        self.urgent_size = None
        replays, problem = self._try(size, is_warm=is_warm)
        agreed = self._agree is None or self._agree(bool(replays))
        if replays and agreed:
            self._replays[size] = replays
            return
        self._usable = False
        self._replays.clear()
        log.warning("CUDA graphs are off: capturing %d rows failed: %s", size, problem)

    def _try(self, size: int, *, is_warm: bool) -> tuple[list[Callable[[], None]], object]:
        """Capture one size: return its replays, none after a failure, and the reason to log where they are
        not used.
        """
        warm = is_warm

        def body() -> None:
            nonlocal warm
            self._body(size)
            warm = True

        try:
            replays = [self._capture.capture(body, is_warm=is_warm)]
            if self._draw is not None:
                draw = partial(self._draw, size)
                if is_warm:
                    draw()  # the step may have been drawn in another way
                replays.append(self._capture.capture(draw, is_warm=is_warm))
        except Exception as error:  # drivers and compilers; everything works without graphs
            if self._agree is not None and not warm:
                raise
            return [], error
        return replays, "another rank could not"

    def has(self, size: int) -> bool:
        return size in self._replays

    def draws(self, size: int) -> bool:
        """Return True if steps of this size may be drawn by a graph too."""
        return self._draw is not None and self.has(size)

    def replay(self, size: int) -> None:
        self._replays[size][0]()

    def replay_draw(self, size: int) -> None:
        """Draw from what `replay` has left."""
        self._replays[size][1]()


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

    def capture(self, body: Callable[[], None], *, is_warm: bool = False) -> Callable[[], None]:
        """Capture `body` and return its replay, which reuses inputs and outputs.

        `body` runs once before, to warm up, when no request runs: the host waits for the device, and cached
        memory is released, as it would hide what the graph takes. `is_warm`: `body` has just run, while
        requests run; nothing is waited for or released.
        """
        if not is_warm:
            torch.cuda.empty_cache()
        free = self._free()
        if not is_warm:
            self._warm_up(body)
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):  # a capture that fails to end leaves its stream current
            self._record(graph, body)
        self.bytes_taken += max(0, free - self._free())
        return graph.replay

    def _record(self, graph: torch.cuda.CUDAGraph, body: Callable[[], None]) -> None:
        # Not by `torch.cuda.graph`, which waits for the device and releases cached memory in any case. Other
        # threads of the process (watchdogs, copies) may call CUDA meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            try:
                body()
            finally:
                graph.capture_end()
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
