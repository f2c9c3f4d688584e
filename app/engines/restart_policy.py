"""How often an engine may die, how long to wait before the next one, and when to try a given-up one."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Times in seconds."""

    deaths: int = 5
    window: float = 60.0
    pauses: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    """Before the restart after the first, second… death in the window; the last one repeats."""
    pardons: int = 3
    """Convictions in the window that clear the count: a few poison requests must not end the model, but
    a machine on which every request is fatal must."""
    cooldown: float = 30.0
    """Until one start of an engine that died too often is tried; each failure doubles it. 0: never."""
    longest_cooldown: float = 900.0


class RestartPolicy:
    """Deaths inside a sliding window of the monotonic clock."""

    def __init__(self, limits: RestartLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._times: deque[float] = deque()
        self._convictions: deque[float] = deque()

    def __len__(self) -> int:
        _forget_before(self._times, self._clock() - self._limits.window)
        return len(self._times)

    def add(self) -> None:
        self._times.append(self._clock())

    def explained(self) -> None:
        """The guilty request was found and is gone: the deaths it caused say nothing about the engine."""
        now = self._clock()
        _forget_before(self._convictions, now - self._limits.window)
        self._convictions.append(now)
        if len(self._convictions) <= self._limits.pardons:
            self._times.clear()

    def clear(self) -> None:
        self._times.clear()

    @property
    def too_many(self) -> bool:
        return len(self) >= self._limits.deaths

    @property
    def pause(self) -> float:
        pauses = self._limits.pauses
        return pauses[min(max(len(self), 1), len(pauses)) - 1]


class RestartBreaker:
    """Circuit breaker of an engine: opens when it is given up, is half-open while one start is tried."""

    def __init__(self, limits: RestartLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._openings = 0
        """In a row: since the engine last ran for longer than the longest cool-down."""
        self._closed_at: float | None = None
        self._next_try: float | None = None

    def open(self) -> float | None:
        """Seconds until the next start may be tried; None where none will be."""
        limits, now = self._limits, self._clock()
        if not limits.cooldown:
            return None
        if self._closed_at is not None and now - self._closed_at > limits.longest_cooldown:
            self._openings = 0
        self._closed_at = None
        # Bounded: two to the power of a year's failures is no number of seconds.
        doublings = min(self._openings, 64)
        self._openings += 1
        wait = min(limits.cooldown * 2.0**doublings, max(limits.cooldown, limits.longest_cooldown))
        self._next_try = now + wait
        return wait

    def close(self) -> None:
        """The engine is ready."""
        self._closed_at, self._next_try = self._clock(), None

    @property
    def seconds_to_try(self) -> int | None:
        """Whole seconds until the next start, at least 1; None while none is waited for."""
        return None if self._next_try is None else max(1, math.ceil(self._next_try - self._clock()))


def _forget_before(times: deque[float], start: float) -> None:
    while times and times[0] < start:
        times.popleft()
