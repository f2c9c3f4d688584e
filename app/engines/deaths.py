"""How often an engine may die, and how long to wait before the next one."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathLimits:
    """Times in seconds."""

    deaths: int = 5
    window: float = 60.0
    pauses: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)
    """Before the restart after the first, second… death in the window; the last one repeats."""
    pardons: int = 3
    """Convictions in the window that clear the count: a few poison requests must not end the model, but
    a machine on which every request is fatal must."""


class Deaths:
    """Deaths inside a sliding window of the monotonic clock."""

    def __init__(self, limits: DeathLimits, clock: Callable[[], float]) -> None:
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

    @property
    def too_many(self) -> bool:
        return len(self) >= self._limits.deaths

    @property
    def pause(self) -> float:
        pauses = self._limits.pauses
        return pauses[min(max(len(self), 1), len(pauses)) - 1]


def _forget_before(times: deque[float], start: float) -> None:
    while times and times[0] < start:
        times.popleft()
