"""Requests and tokens a minute of one key: token buckets on the monotonic clock."""

import math
import time
from collections.abc import Callable, Iterator

from ..errors import ApiError
from .keys import Key

Clock = Callable[[], float]


class Bucket:
    """Holds a minute's worth at most, fills evenly, may go below zero: what was used is paid back."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.capacity = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._at) * self.capacity / 60)
        self._at = now
        return self._level

    def take(self, cost: int) -> float:
        """0 when taken, else the seconds until it could be. What exceeds a minute needs a full bucket."""
        missing = min(cost, self.capacity) - self.level
        if missing <= 1e-9:
            self._level -= cost
            return 0.0
        return self._seconds(missing)

    def spend(self, cost: int) -> None:
        """Without asking: it is used already."""
        self._level = self.level - cost

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level + 1e-9))

    @property
    def full_in(self) -> float:
        return self._seconds(self.capacity - self.level)

    def _seconds(self, amount: float) -> float:
        return amount * 60 / self.capacity


class Meter:
    """What one key has left."""

    def __init__(self, key: Key, clock: Clock = time.monotonic) -> None:
        self.limits = (key.rpm, key.tpm)
        self._requests = None if key.rpm is None else Bucket(key.rpm, clock)
        self._tokens = None if key.tpm is None else Bucket(key.tpm, clock)

    def take_request(self) -> None:
        """Raises ApiError 429."""
        if self._requests is not None and (wait := self._requests.take(1)):
            raise _limited("requests", self._requests.capacity, wait)

    def take_tokens(self, count: int) -> None:
        """Of a prompt, before it is computed. Raises ApiError 429."""
        if self._tokens is not None and (wait := self._tokens.take(count)):
            raise _limited("tokens", self._tokens.capacity, wait)

    def spend_tokens(self, count: int) -> None:
        """Of an answer, once it is known."""
        if self._tokens is not None:
            self._tokens.spend(count)

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """OpenAI's names."""
        for kind, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                yield b"x-ratelimit-limit-" + kind, b"%d" % bucket.capacity
                yield b"x-ratelimit-remaining-" + kind, b"%d" % bucket.remaining
                yield b"x-ratelimit-reset-" + kind, _span(bucket.full_in).encode()


class Meters:
    """One meter a key, for as long as its limits stay."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._by_key: dict[str, Meter] = {}

    def of(self, key: Key) -> Meter:
        meter = self._by_key.get(key.id)
        if meter is None or meter.limits != (key.rpm, key.tpm):
            meter = self._by_key[key.id] = Meter(key, self._clock)
        return meter

    def forget(self, key: Key) -> None:
        self._by_key.pop(key.id, None)


def _limited(what: str, limit: int, wait: float) -> ApiError:
    seconds = max(1, math.ceil(wait))
    return ApiError(
        429,
        f"This key's limit of {limit} {what} a minute is reached. Try again in {seconds} s.",
        "rate_limit_exceeded",
        None,
        "rate_limit_error",
        {"Retry-After": str(seconds)},
    )


def _span(seconds: float) -> str:
    """As OpenAI writes them: 120ms, 7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
