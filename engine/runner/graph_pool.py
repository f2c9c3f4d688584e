"""CUDA graphs of decoding steps: captured once, replayed with one launch instead of hundreds.

A graph has one size. A step of fewer rows is padded; a step without a graph of a near size runs eagerly.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from ..planning.memory_model import capture_sizes

log = logging.getLogger(__name__)

WANTED: Final = 16
"""Steps of a size after which its graph is captured even though the engine is never idle."""
NEAR: Final = 2
"""Largest ratio of graph size to rows: padding is cheap, as decoding mostly reads weights."""


class GraphCapture(Protocol):
    bytes_taken: int
    """Device memory of all graphs so far."""

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Run `body` once to warm up, then capture it; return its replay, which reuses inputs and outputs."""
        ...


class DecodeGraphs:
    """Graphs of `body(size)`, a step of `size` rows whose inputs and outputs have fixed addresses.

    The largest graph is captured first, as smaller ones then reuse the memory of its pool.
    """

    def __init__(
        self,
        capture: GraphCapture,
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
