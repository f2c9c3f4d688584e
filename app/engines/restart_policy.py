"""Restart policy: how often an engine may die, the delay before each restart, and the retry of a failed
model.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Limits of restarts. Times in seconds."""

    deaths: int = 5
    window: float = 60.0
    pauses: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    """Delay before the restart after the first, second… death in the window. The last one repeats."""
    max_forgiven: int = 3
    """Poison requests found in the window that reset the count of deaths. More are not forgiven: a few poison
    requests must not end the model, but a machine on which every request is fatal must.
    """
    cooldown: float = 30.0
    """Delay before one start of an engine that died too often is tried. Each failure doubles it. 0: never."""
    longest_cooldown: float = 900.0


class RestartPolicy:
    """Count of deaths inside a sliding window of the monotonic clock."""

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

    def forgive(self) -> None:
        """Forget the deaths that a poison request caused: it is gone, and the engine is not to blame."""
        now = self._clock()
        _forget_before(self._convictions, now - self._limits.window)
        self._convictions.append(now)
        if len(self._convictions) <= self._limits.max_forgiven:
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
    """Circuit breaker of an engine: open while the engine is given up, half-open while one start is tried."""

    def __init__(self, limits: RestartLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._openings = 0
        """Consecutive openings since the engine last ran for longer than the longest cool-down."""
        self._closed_at: float | None = None
        self._next_try: float | None = None

    def open(self) -> float | None:
        """Open the breaker. Returns the seconds until the next start may be tried; None for never."""
        limits, now = self._limits, self._clock()
        if not limits.cooldown:
            return None
        if self._closed_at is not None and now - self._closed_at > limits.longest_cooldown:
            self._openings = 0
        self._closed_at = None
        # Bounded: two to the power of a year's failures overflows a float.
        doublings = min(self._openings, 64)
        self._openings += 1
        wait = min(limits.cooldown * 2.0**doublings, max(limits.cooldown, limits.longest_cooldown))
        self._next_try = now + wait
        return wait

    def close(self) -> None:
        """Close the breaker: the engine is ready."""
        self._closed_at, self._next_try = self._clock(), None

    @property
    def seconds_to_try(self) -> int | None:
        """Whole seconds until the next start, at least 1. None when no start is scheduled."""
        return None if self._next_try is None else max(1, math.ceil(self._next_try - self._clock()))


def _forget_before(times: deque[float], start: float) -> None:
    while times and times[0] < start:
        times.popleft()
