"""Latencies and failed share of recently finished requests, by model; percentiles by nearest rank."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..store.record import RequestRecord
from .snapshot import NA, ErrorRate, Number

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
    """Latencies of the requests that ended in the window. Use it only from the daemon's event loop."""

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


ERROR_WINDOW_S: Final = 300.0
SLICE_S: Final = 10.0
MOST_MODELS: Final = 100
MOST_REASON: Final = 300


@dataclass(slots=True)
class _Slice:
    begin: float
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class ErrorRates:
    """Counts of the last five minutes. Use it only from the daemon's event loop.

    Counts requests that were answered (2xx) or failed, not those with a caller's error or cancelled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[_Slice] = deque()
        self._reasons: dict[str, str] = {}

    def add(self, record: RequestRecord, reason: str = "") -> None:
        """Count a finished request. `reason`: the message of its error."""
        failed = record.is_failure
        if not failed and record.http_status >= 400:
            return
        model = record.model
        now = self._current()
        (now.failed if failed else now.answered)[model] += 1
        if failed:
            self._reasons.pop(model, None)
            self._reasons[model] = (reason or record.error_code)[:MOST_REASON]
            while len(self._reasons) > MOST_MODELS:
                del self._reasons[next(iter(self._reasons))]

    def read(self) -> tuple[ErrorRate, ...]:
        """Models with requests in the window, most failures first."""
        self._drop_old()
        answered = sum((each.answered for each in self._slices), Counter[str]())
        failed = sum((each.failed for each in self._slices), Counter[str]())
        rates = [
            ErrorRate(
                model=model,
                finished=answered[model] + failed[model],
                failed=failed[model],
                rate=failed[model] / (answered[model] + failed[model]),
                reason=self._reasons.get(model, "") if failed[model] else "",
            )
            for model in answered.keys() | failed.keys()
        ]
        return tuple(sorted(rates, key=lambda each: (-each.failed, each.model))[:MOST_MODELS])

    def _current(self) -> _Slice:
        self._drop_old()
        begin = self._clock() // SLICE_S * SLICE_S
        if not self._slices or self._slices[-1].begin != begin:
            self._slices.append(_Slice(begin))
        return self._slices[-1]

    def _drop_old(self) -> None:
        oldest = self._clock() - ERROR_WINDOW_S
        while self._slices and self._slices[0].begin + SLICE_S <= oldest:
            self._slices.popleft()


def total_rate(rates: tuple[ErrorRate, ...]) -> Number:
    """Rate over all models; NA if nothing finished."""
    finished = sum(each.finished for each in rates)
    return sum(each.failed for each in rates) / finished if finished else NA
