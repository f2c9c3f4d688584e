"""The ways into the panel: a one-time link for whoever sits at the box, or an admin key."""

import hashlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from ..errors import ApiError

TOKEN_LIFE = 15 * 60.0
"""Seconds."""
PATH = "/admin/signin"
FREE_FAILURES = 5
LONGEST_WAIT = 60.0
_MOST_TOKENS = 64
_MOST_ADDRESSES = 4096
Clock = Callable[[], float]


class OneTimeTokens:
    """Each opens one session within 15 minutes. In memory, as hashes."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def make(self) -> str:
        now = self._clock()
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        while len(self._until) >= _MOST_TOKENS:
            del self._until[next(iter(self._until))]
        token = secrets.token_urlsafe(32)
        self._until[_digest(token)] = now + TOKEN_LIFE
        return token

    def use(self, token: str) -> bool:
        """True once."""
        until = self._until.pop(_digest(token), None)
        return until is not None and self._clock() < until


class BackOff:
    """Slows down an address after 5 failed sign-ins: 1 s, 2 s, 4 s… up to a minute. A success forgives."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """By address: how many, and until when it has to wait."""

    def check(self, address: str) -> None:
        """Raises ApiError 429."""
        _, until = self._failures.get(address, (0, 0.0))
        wait = until - self._clock()
        if wait > 0:
            seconds = max(1, math.ceil(wait))
            raise ApiError(
                429,
                f"Too many failed sign-ins. Try again in {seconds} s.",
                "too_many_attempts",
                None,
                "rate_limit_error",
                {"Retry-After": str(seconds)},
            )

    def failed(self, address: str) -> None:
        count = self._failures.pop(address, (0, 0.0))[0] + 1
        over = count - FREE_FAILURES
        wait = min(LONGEST_WAIT, 2.0 ** min(over, 10)) if over >= 0 else 0.0
        self._failures[address] = count, self._clock() + wait
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)

    def succeeded(self, address: str) -> None:
        self._failures.pop(address, None)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
