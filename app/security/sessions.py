"""Browser sessions, in memory only: a restart of the daemon signs everybody out.

A browser holds a secret of 256 bits; we hold its SHA-256. The secret rotates while the session lives, so that
a leaked one soon expires.
"""

import hashlib
import hmac
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import ApiError

IDLE = 2 * 3600.0
"""Idle seconds until a session ends."""
ABSOLUTE = 12 * 3600.0
"""Seconds until a session ends in any case."""
ROTATE = 1800.0
"""Seconds after which the browser gets a new secret."""
GRACE = 60.0
"""Seconds that the old secret stays valid: other tabs may be about to send it."""
MOST = 256


@dataclass(slots=True, eq=False)
class Session:
    """Times are monotonic seconds. `key_digest`: hash of the admin key that opened it, or None."""

    csrf_token: str
    key_digest: str | None
    opened: float
    used: float
    rotated: float
    closed: bool = False
    digests: list[str] = field(default_factory=list)


class Sessions:
    """Table of the open sessions. Use it only from the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_digest: dict[str, tuple[Session, float | None]] = {}
        """Session, and the time at which an old secret expires; by hash of the secret."""

    def open(self, key_digest: str | None = None) -> tuple[Session, str]:
        """Open a session. Returns (session, secret for the cookie)."""
        now = self._clock()
        self._sweep(now)
        session = Session(secrets.token_urlsafe(32), key_digest, opened=now, used=now, rotated=now)
        return session, self._give_secret(session)

    def find(self, secret: str) -> Session | None:
        """Find the open session of a secret. Counts as use."""
        found = self._by_digest.get(_digest(secret))
        if found is None:
            return None
        session, until = found
        now = self._clock()
        if self._has_ended(session, now):
            self.close(session)
            return None
        if until is not None and now > until:
            return None
        session.used = now
        return session

    def rotate(self, session: Session) -> str | None:
        """Make a new secret if one is due."""
        now = self._clock()
        if session.closed or now - session.rotated < ROTATE:
            return None
        for digest in session.digests[:-1]:
            self._by_digest.pop(digest, None)
        last = session.digests[-1]
        self._by_digest[last] = session, now + GRACE
        session.digests = [last]
        session.rotated = now
        return self._give_secret(session)

    def close(self, session: Session) -> None:
        session.closed = True
        for digest in session.digests:
            self._by_digest.pop(digest, None)

    def is_alive(self, session: Session) -> bool:
        """Return whether a session is open, without counting as use: for streams that stay open."""
        return not session.closed and self._clock() - session.opened < ABSOLUTE

    def _give_secret(self, session: Session) -> str:
        secret = secrets.token_urlsafe(32)
        digest = _digest(secret)
        session.digests.append(digest)
        self._by_digest[digest] = session, None
        return secret

    def _has_ended(self, session: Session, now: float) -> bool:
        return session.closed or now - session.used >= IDLE or now - session.opened >= ABSOLUTE

    def _sweep(self, now: float) -> None:
        sessions = sorted({session for session, _ in self._by_digest.values()}, key=lambda each: each.used)
        ended = [session for session in sessions if self._has_ended(session, now)]
        living = [session for session in sessions if session not in ended]
        for session in [*ended, *living[: max(0, len(living) - MOST + 1)]]:
            self.close(session)


def is_csrf_token(session: Session, given: str) -> bool:
    return hmac.compare_digest(session.csrf_token.encode(), given.encode("utf-8", "replace"))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


TOKEN_LIFE = 15 * 60.0
"""Seconds."""
PATH = "/admin/signin"
FREE_FAILURES = 5
LONGEST_WAIT = 60.0
_MOST_TOKENS = 64
_MOST_ADDRESSES = 4096
Clock = Callable[[], float]


class OneTimeTokens:
    """One-time tokens, each for one session within 15 minutes. In memory, as hashes."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def make(self) -> str:
        now = self._clock()
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        while len(self._until) >= _MOST_TOKENS:
            del self._until[next(iter(self._until))]
        token = secrets.token_urlsafe(32)
        self._until[_token_digest(token)] = now + TOKEN_LIFE
        return token

    def use(self, token: str) -> bool:
        """Consume a token. Returns True once."""
        until = self._until.pop(_token_digest(token), None)
        return until is not None and self._clock() < until


class SignInBackoff:
    """Delay per address after 5 failed sign-ins: 1 s, 2 s, 4 s… up to a minute. A success resets it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Number of failures, and the time until which to wait; by address."""

    def check(self, address: str) -> None:
        """Raise ApiError 429 while the address has to wait."""
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

    def record_failure(self, address: str) -> None:
        count = self._failures.pop(address, (0, 0.0))[0] + 1
        over = count - FREE_FAILURES
        wait = min(LONGEST_WAIT, 2.0 ** min(over, 10)) if over >= 0 else 0.0
        self._failures[address] = count, self._clock() + wait
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)

    def record_success(self, address: str) -> None:
        self._failures.pop(address, None)


def _token_digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
