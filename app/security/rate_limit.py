"""Rate limits per key, in requests and tokens per minute: token buckets on the monotonic clock.

Tokens are reserved before a request runs, for the longest possible answer, and unused ones are returned at
its end: concurrent requests cannot spend one minute's quota several times.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from ..config.entries import TokenPrice
from ..errors import ApiError
from .keys import ApiKey, KeyQuota, QuotaLedger, QuotaReservation

Clock = Callable[[], float]

UNSTATED_OUTPUT = 1024
"""Tokens reserved for a choice whose request sets no limit; half a minute's quota where that is less."""


WRONG_KEYS_PER_MINUTE: Final = 60
"""Requests with a wrong key that one address may send; more get 429."""
_MOST_ADDRESSES: Final = 4096


class TokenBucket:
    """Token bucket. Holds one minute's quota at most, fills evenly, and may go below zero: debts are paid
    back first.
    """

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
        """Take tokens. Returns 0 when taken, else the seconds until they could be. A cost above the quota
        needs a full bucket.
        """
        missing = min(cost, self.capacity) - self.level
        if missing <= 1e-9:
            self._level -= cost
            return 0.0
        return self._seconds(missing)

    def spend(self, cost: int) -> None:
        """Take tokens without a check, because they are used already. Negative to return a reservation."""
        self._level = min(self.capacity, self.level - cost)

    @property
    def remaining(self) -> int:
        return max(0, math.floor(self.level + 1e-9))

    @property
    def full_in(self) -> float:
        return self._seconds(self.capacity - self.level)

    def _seconds(self, amount: float) -> float:
        return amount * 60 / self.capacity


class WrongKeyLimiter:
    """Rate limit of wrong keys by address, one token bucket each. Valid keys are not slowed by it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        """Buckets of the addresses that sent a wrong key last, the latest at the end."""

    def take(self, address: str) -> None:
        """Count a wrong key. Raises ApiError 429."""
        bucket = self._buckets.pop(address, None) or TokenBucket(WRONG_KEYS_PER_MINUTE, self._clock)
        self._buckets[address] = bucket
        if len(self._buckets) > _MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        if wait := bucket.take(1):
            seconds = max(1, math.ceil(wait))
            raise ApiError(
                429,
                "Too many requests with an invalid API key came from your address. Correct the key (`llmbox "
                f"key ls` shows those of this server), then try again in {seconds} s.",
                "too_many_attempts",
                None,
                "rate_limit_error",
                {"Retry-After": str(seconds)},
            )


class KeyLimiter:
    """Rate limits and quotas of one key."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic, quota: KeyQuota | None = None) -> None:
        self.limits = (key.rpm, key.tpm)
        self.key = key
        """The key as it is now; its quotas may change while its buckets stay."""
        self._quota = quota
        self._requests = None if key.rpm is None else TokenBucket(key.rpm, clock)
        self._tokens = None if key.tpm is None else TokenBucket(key.tpm, clock)

    def take_request(self) -> None:
        """Take one request. Raises ApiError 429."""
        if self._requests is not None and (wait := self._requests.take(1)):
            raise _limited("requests", self._requests.capacity, wait)
        if self._quota is not None:
            self._quota.take_request(self.key)

    def reserve_tokens(
        self, prompt: int, output: int, choices: int = 0, price: TokenPrice | None = None
    ) -> "TokenReservation":
        """Reserve tokens for a prompt and the longest answer to it. Raises ApiError 429.

        `choices`: number of choices without a limit; they get an estimate within `output`.
        `price`: price of the model's tokens, for the key's budgets.
        """
        reserved = self._reserve_in_bucket(prompt, output, choices)
        if self._quota is None:
            return reserved
        if choices:
            output = min(output, choices * UNSTATED_OUTPUT)
        try:
            reserved.quota = self._quota.reserve(self.key, prompt, output, price, is_estimate=choices > 0)
        except ApiError:
            reserved.cancel(prompt)
            raise
        return reserved

    def _reserve_in_bucket(self, prompt: int, output: int, choices: int) -> "TokenReservation":
        if self._tokens is None:
            return TokenReservation(None, 0)
        if choices:
            output = min(output, choices * min(UNSTATED_OUTPUT, max(1, self._tokens.capacity // 2)))
        if wait := self._tokens.take(prompt + output):
            needs = f" This request reserves {prompt + output}: its prompt and its longest answer."
            raise _limited("tokens", self._tokens.capacity, wait, needs)
        return TokenReservation(self._tokens, output)

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Rate-limit headers under OpenAI's names."""
        for kind, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                yield b"x-ratelimit-limit-" + kind, b"%d" % bucket.capacity
                yield b"x-ratelimit-remaining-" + kind, b"%d" % bucket.remaining
                yield b"x-ratelimit-reset-" + kind, _span(bucket.full_in).encode()


class TokenReservation:
    """Reserved output tokens of one request. `settle` returns the unused ones."""

    def __init__(self, bucket: TokenBucket | None, output: int) -> None:
        self._bucket = bucket
        self._left = output
        self._is_settled = False
        self.quota: QuotaReservation | None = None

    def spend(self, count: int) -> None:
        """Count tokens of the answer as they come. Tokens beyond an estimate are charged at once."""
        self._left -= count
        if self._left < 0 and self._bucket is not None:
            self._bucket.spend(-self._left)
            self._left = 0
        if self.quota is not None:
            self.quota.spend(count)

    def settle(self) -> None:
        """End the request. Only the first call counts."""
        if self._is_settled:
            return
        if self._bucket is not None:
            self._bucket.spend(-self._left)
        if self.quota is not None:
            self.quota.settle()
        self._is_settled = True

    def cancel(self, prompt: int) -> None:
        """Cancel a request that never ran: its `prompt` tokens are returned too."""
        self._left += prompt
        if self.quota is not None:
            self.quota.spend_prompt(-prompt)
        self.settle()


class KeyLimiters:
    """One meter per key, kept as long as the key's limits do not change."""

    def __init__(self, clock: Clock = time.monotonic, ledger: QuotaLedger | None = None) -> None:
        self._clock = clock
        self._ledger = ledger
        self._by_key: dict[str, KeyLimiter] = {}

    def of(self, key: ApiKey) -> KeyLimiter:
        meter = self._by_key.get(key.id)
        if meter is None or meter.limits != (key.rpm, key.tpm):
            quota = None if self._ledger is None else self._ledger.of(key.id)
            meter = self._by_key[key.id] = KeyLimiter(key, self._clock, quota)
        meter.key = key
        return meter

    def forget(self, key: ApiKey) -> None:
        self._by_key.pop(key.id, None)


def _limited(what: str, limit: int, wait: float, needs: str = "") -> ApiError:
    seconds = max(1, math.ceil(wait))
    return ApiError(
        429,
        f"This key's limit of {limit} {what} a minute is reached.{needs} Try again in {seconds} s.",
        "rate_limit_exceeded",
        None,
        "rate_limit_error",
        {"Retry-After": str(seconds)},
    )


def _span(seconds: float) -> str:
    """Format a duration as OpenAI does: 120ms, 7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
