"""Time of an engine's steps by their content, learned from the counters of each step, and the errors of
forecasts made from it. Nothing is assumed about the model or the machine. Times are seconds, sizes are
tokens.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from llmbox.engine.ipc.messages import EngineStats, ModelInfo
from llmbox.engine.ipc.sequence_times import StepWork

STALE_S: Final = 120.0
"""Seconds of refusals after which a measured time begins to count for less, down to half: a machine that was
busy when it was measured must not have requests refused for ever."""
LEAST_WEIGHT: Final = 0.1
"""Weight of a new measurement in a running mean."""
_KEPT: Final = 16
"""Number of times kept for each size."""
_SLOW_WEIGHT: Final = 1 / 64
"""Weight of a step in means over many steps."""
_FAST_WEIGHT: Final = 1 / 4
"""Weight of a step in the mean over the last few."""
_PACES: Final = (0.5, 3.0)
"""Minimum and maximum weight of one step in that mean."""


@dataclass(slots=True)
class _Point:
    size: float
    at: float
    count: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    seconds: float = 0.0
    """Mean of the middle third of `times`, of two the shorter: the first step after a load, or one that
    another program kept from the cores, takes many times as long, and would count for all of the next ones.
    """

    def add(self, seconds: float) -> None:
        self.times.append(seconds)
        kept = len(self.times)
        middle = sorted(self.times)[kept // 3 : max(1, kept - (kept + 1) // 3)]
        self.seconds = sum(middle) / len(middle)


class StepCurve:
    """Time of a step by its size, learned from steps of many sizes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._points: dict[int, _Point] = {}

    @property
    def is_measured(self) -> bool:
        return bool(self._points)

    def add(self, size: int, seconds: float) -> None:
        """Learn from one step. Steps of about the same size are one."""
        now = self._clock()
        bucket = _bucket(size)
        if (point := self._points.get(bucket)) is None:
            point = self._points[bucket] = _Point(size, now)
        point.count += 1
        weight = max(LEAST_WEIGHT, 1 / point.count)
        point.size += weight * (size - point.size)
        point.add(seconds)
        point.at = now

    def predict(self, size: float) -> float:
        """Predict the time of a step. One step at least must have been measured.

        Between measured sizes the curve is a line; below the smallest one it is that one's time. Above the
        largest one it goes on as steeply as from half of that size. Where nothing tells how steep that is, it
        stays flat up to twice the size and is proportional from there on.
        """
        known = self._known()
        below = known[0]
        if size <= below[0]:
            return below[1]
        for above in known[1:]:
            if size <= above[0]:
                return below[1] + (size - below[0]) * (above[1] - below[1]) / (above[0] - below[0])
            below = above
        most, at_most = known[-1]
        half = next((point for point in reversed(known) if point[0] <= most / 2), None)
        if half is None:
            return at_most * max(1.0, size / (2 * most))
        return at_most + (size - most) * (at_most - half[1]) / (most - half[0])

    def _known(self) -> list[tuple[float, float]]:
        """Return sizes and their times, in order. Where a size took less time than a smaller one, those from
        that one on have the mean of their steps: a size that was measured once, while the machine was busy,
        does not make larger ones slow.
        """
        now = self._clock()
        pools: list[tuple[float, int, list[float]]] = []
        for point in sorted(self._points.values(), key=attrgetter("size")):
            seconds, count, sizes = point.seconds, len(point.times), [point.size]
            seconds *= max(0.5, min(1.0, 2.0 - (now - point.at) / STALE_S))
            while pools and pools[-1][0] > seconds:
                earlier, steps, smaller = pools.pop()
                seconds = (seconds * count + earlier * steps) / (count + steps)
                count, sizes = count + steps, smaller + sizes
            pools.append((seconds, count, sizes))
        return [(size, seconds) for seconds, _, sizes in pools for size in sizes]


def _bucket(size: int) -> int:
    """Return one number for sizes that differ by less than a quarter of an octave."""
    return size if size < 8 else 8 + int(4 * math.log2(size / 8))


FEW_STEPS: Final = 500
_FEW_MIXED: Final = 20
"""Steps of running requests without and with prompts, below which nothing is recommended."""
_RECENT_STEPS: Final = 20_000
"""Steps after which the earlier half counts for half as much."""
EVEN: Final = 1.2
"""Times that a step with prompts may take of one without: at most that is even enough."""
RARE: Final = 0.01
"""Share of steps with prompts that a 99th percentile does not show."""


@dataclass(slots=True)
class Interference:
    """Steps of running requests, with prompts beside them (mixed) and without."""

    mixed_steps: int = 0
    mixed_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    rows: int = 0
    """Running requests, summed over these steps."""

    def add(self, seconds: float, rows: int, *, is_mixed: bool) -> None:
        """Count a step of running requests."""
        if self.steps >= _RECENT_STEPS:
            self.mixed_steps, self.mixed_seconds = self.mixed_steps // 2, self.mixed_seconds / 2
            self.decode_steps, self.decode_seconds = self.decode_steps // 2, self.decode_seconds / 2
            self.rows //= 2
        self.rows += rows
        if is_mixed:
            self.mixed_steps += 1
            self.mixed_seconds += seconds
        else:
            self.decode_steps += 1
            self.decode_seconds += seconds

    @property
    def steps(self) -> int:
        return self.mixed_steps + self.decode_steps

    @property
    def ratio(self) -> float | None:
        """Mean time of a mixed step in times of one without prompts; None before both were measured."""
        if not (self.mixed_steps and self.decode_seconds):
            return None
        return self.mixed_seconds / self.mixed_steps * self.decode_steps / self.decode_seconds

    @property
    def share(self) -> float:
        """Share of the steps of running requests that were mixed."""
        return self.mixed_steps / self.steps if self.steps else 0.0


def recommend_pair(
    measured: Interference, work: StepWork, info: ModelInfo, cores: int
) -> tuple[int, int] | None:
    """Return the cores of `--disaggregate` that keep prompts out of the steps of running requests; None
    where they are even without, too little was measured, or the model cannot run as a pair of engines.

    The cores of a CPU are divided as its time was: P has the share that steps with prompts took.
    """
    is_known = measured.decode_steps >= FEW_STEPS and measured.mixed_steps >= _FEW_MIXED
    if not is_known or (measured.ratio or 0.0) <= EVEN or measured.share < RARE:
        return None
    if info.device != "cpu" or info.disaggregate or info.tp * info.pp > 1 or not info.generates or cores < 2:
        return None
    prompts = round(cores * work.prefill_seconds / work.seconds) if work.seconds else 1
    prompts = min(cores - 1, max(1, prompts))
    return prompts, cores - prompts


class MeasuredSteps:
    """Times of one engine's steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` keeps running while requests are refused (`STALE_S`)."""
        self.decode = StepCurve(clock)
        """Steps of running requests alone, by their number."""
        self.mixed = StepCurve(clock)
        """Steps with prompts, by all tokens."""
        self.interference = Interference()
        self.tokens_per_row = 1.0
        """Tokens that a running request gets in a step: more than 1 where drafts are accepted."""
        self.extra = 0.0
        """Time that prompts add to a step of running requests, in the mean over steps with and without."""
        self._pace = 1.0

    @property
    def pace(self) -> float:
        """Time of the last few steps in times of what such steps took before, at least 1: cores that the
        engine shares with others become slower all at once.
        """
        return max(1.0, self._pace)

    def rest(self) -> None:
        """Record that no request is open: measurements restart with the next steps."""
        self.extra, self._pace = 0.0, 1.0

    @property
    def is_measured(self) -> bool:
        return self.decode.is_measured or self.mixed.is_measured

    def observe(self, before: EngineStats, now: EngineStats) -> None:
        """Learn from the step between two readings; nothing where there was none, or several."""
        old, new = before.work, now.work
        if new.steps != old.steps + 1:
            return
        seconds, rows = new.seconds - old.seconds, new.decode_rows - old.decode_rows
        prompts = new.prefill_tokens - old.prefill_tokens
        extra = 0.0
        if self.is_measured and (rows or prompts > 0):
            usual = self.predict_mixed(rows, prompts) if prompts > 0 else self.predict_decode(rows)
            ratio = seconds / usual if usual else 1.0
            self._pace += _FAST_WEIGHT * (min(max(ratio, _PACES[0]), _PACES[1]) - self._pace)
        if rows:
            self.interference.add(seconds, rows, is_mixed=prompts > 0)
        if prompts > 0:
            if rows:
                extra = max(0.0, seconds - self.predict_decode(rows)) if self.is_measured else 0.0
            self.mixed.add(rows + prompts, seconds)
        elif rows:
            self.decode.add(rows, seconds)
            drawn = (now.output_tokens - before.output_tokens) / rows
            self.tokens_per_row += _SLOW_WEIGHT * (max(1.0, drawn) - self.tokens_per_row)
        if rows:
            self.extra += _SLOW_WEIGHT * (extra - self.extra)

    def forget_interference(self) -> None:
        """Reset the measured delay of running requests by prompts."""
        self.interference = Interference()

    def predict_decode(self, rows: int) -> float:
        """Predict a step of this number of running requests."""
        return (self.decode if self.decode.is_measured else self.mixed).predict(rows)

    def predict_mixed(self, rows: int, prompt_tokens: int) -> float:
        """Predict a step of running requests and prompt tokens; at least that without the prompts."""
        size = rows + prompt_tokens
        if not self.mixed.is_measured:
            return self.decode.predict(size)
        least = self.decode.predict(rows) if rows and self.decode.is_measured else 0.0
        return max(self.mixed.predict(size), least)

    def predict_prompts(self, tokens: int, rows: int, budget: int) -> float:
        """Predict the steps in which `tokens` of prompts are computed beside `rows` running requests.
        `budget`: most tokens of a step.
        """
        chunk = max(1, budget - rows)
        full, rest = divmod(tokens, chunk)
        seconds = full * self.predict_mixed(rows, chunk) if full else 0.0
        return seconds + (self.predict_mixed(rows, rest) if rest else 0.0)


_FEW: Final = 8
"""Forecasts whose error says nothing yet."""
_MOST_FACTOR: Final = 3.0


class ForecastError:
    """Factor for forecasts: nine of ten recent requests took no longer than it makes of theirs."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=64)

    def add(self, predicted: float, actual: float) -> None:
        """Learn from one request; `predicted` without a factor."""
        if predicted > 0:
            self._ratios.append(actual / predicted)

    @property
    def factor(self) -> float:
        if len(self._ratios) < _FEW:
            return 1.0
        ninth = sorted(self._ratios)[math.ceil(0.9 * len(self._ratios)) - 1]
        return min(_MOST_FACTOR, max(1.0, ninth))


class ForecastErrors:
    """Errors of both times of a request."""

    def __init__(self) -> None:
        self.ttft, self.tpot = ForecastError(), ForecastError()
