"""Pacing of downloads: a bandwidth cap over all of them, and waits between retries."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


class Stopped(Exception):  # noqa: N818 - nothing failed
    """The download was asked to stop."""


class RateLimiter:
    """Bandwidth cap in bytes a second over all threads that share it. The bound may change at any time."""

    def __init__(self, rate: Callable[[], float | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> float:
        """Return the seconds to wait before these bytes are within the bound."""
        rate = self._rate()
        if not rate:
            return 0.0
        with self._lock:
            now = self._clock()
            self._free_at = max(now, self._free_at) + count / rate
            return self._free_at - now


@dataclass(frozen=True, slots=True)
class Retries:
    """Tries in a row without a byte of progress, and the first wait in seconds, which doubles."""

    tries: int = 8
    first: float = 0.5
    longest: float = 30.0

    def wait(self, failures: int, asked: float | None) -> float:
        """Return the seconds to wait before the next try, after so many failures in a row. A wait that the
        server asks for is respected.
        """
        if asked is not None:
            return asked
        bound: float = min(self.longest, self.first * 2 ** (failures - 1))
        return bound * random.uniform(0.5, 1.0)  # noqa: S311 - spreads clients out, protects nothing
