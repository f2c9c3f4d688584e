"""Latencies of recently finished requests, by model; percentiles by nearest rank."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..store.record import RequestRecord
from .snapshot import NA, Number

WINDOW_S: Final = 120.0
_MOST = 1024


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 95th percentile, in seconds."""

    p50: Number = NA
    p95: Number = NA


@dataclass(frozen=True, slots=True)
class _Ended:
    at: float
    model: str
    ttft: float | None
    tpot: float | None


class Latencies:
    """Use it only from the daemon's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[_Ended] = deque(maxlen=_MOST)
        self.requests = 0
        self.failed = 0

    def add(self, record: RequestRecord) -> None:
        self.requests += 1
        self.failed += record.is_failure
        self._ended.append(_Ended(self._clock(), record.model, record.ttft_s, record.tpot_s))

    def of(self, model: str | None = None) -> tuple[Spread, Spread]:
        """Return (time to first token, time per token) of the last two minutes, of one model or of all."""
        oldest = self._clock() - WINDOW_S
        while self._ended and self._ended[0].at < oldest:
            self._ended.popleft()
        chosen = [each for each in self._ended if model in {None, each.model}]
        return _spread(each.ttft for each in chosen), _spread(each.tpot for each in chosen)


def _spread(values: Iterable[float | None]) -> Spread:
    known = sorted(value for value in values if value is not None)
    return Spread(nearest_rank(known, 0.5), nearest_rank(known, 0.95)) if known else Spread()


def nearest_rank(ascending: Sequence[float], share: float) -> float:
    """Percentile by nearest rank. `share` is 0 to 1."""
    return ascending[max(1, math.ceil(share * len(ascending))) - 1]
