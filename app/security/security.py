"""Identity of a caller with its permissions, browser sessions, and the facade of all access control:
`services.security`.

Sessions are in memory only: a restart of the daemon signs everybody out. A browser holds a secret of 256
bits; we hold its SHA-256. The secret rotates while the session lives, so that a leaked one soon expires.
"""

import hashlib
import hmac
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import ApiError
from .key_store import KeyStore, LastUsed
from .keys import ApiKey, QuotaLedger, Scope, Tier
from .rate_limit import KeyLimiter, KeyLimiters, WrongKeyLimiter

IDLE = 2 * 3600.0
"""Idle seconds until a session ends."""
ABSOLUTE = 12 * 3600.0
"""Seconds until a session ends in any case."""
ROTATE = 1800.0
"""Seconds after which the browser gets a new secret."""
GRACE = 60.0
"""Seconds that the old secret stays valid: other tabs may be about to send it."""
MOST_SESSIONS = 256


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
        for session in [*ended, *living[: max(0, len(living) - MOST_SESSIONS + 1)]]:
            self.close(session)


def is_csrf_token(session: Session, given: str) -> bool:
    return hmac.compare_digest(session.csrf_token.encode(), given.encode("utf-8", "replace"))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


TOKEN_LIFE = 15 * 60.0
"""Seconds."""
SIGN_IN_PATH = "/admin/signin"
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


BACKGROUND_PRIORITY = 1000
"""Number added to the priority of a background request, which puts it behind every key's class."""
PANEL = "(panel)"
"""Name of panel sessions in the request log, where a key has its name; no key can have it."""


def tier_of(priority: int) -> Tier:
    """Class of a request with this priority, which may be behind that of its key."""
    return "premium" if priority < 0 else "standard" if priority == 0 else "background"


@dataclass(frozen=True, slots=True)
class Identity:
    """Caller of a request. `local`: our own user over the unix socket. `nobody`: no credentials were sent."""

    kind: Literal["local", "session", "key", "nobody"]
    key: ApiKey | None = None
    session: Session | None = None
    meter: KeyLimiter | None = None
    is_background: bool = False
    """Nobody waits for the answer: all other requests go first."""

    @property
    def name(self) -> str:
        """Name for the request log."""
        if self.key is not None:
            return self.key.name
        return PANEL if self.kind == "session" else ""

    def keeps_content(self, *, keyless: bool) -> bool:
        """Return whether prompt and answer may be kept. `keyless`: the setting for callers without a key."""
        return keyless if self.key is None else self.key.log_content

    def may(self, scope: Scope) -> bool:
        """Return whether the credentials grant `scope`. Access open to `nobody` is decided by the guard."""
        return self.kind in {"local", "session"} or (self.key is not None and self.key.allows(scope))

    def may_use_model(self, name: str) -> bool:
        return self.key is None or self.key.allows_model(name)

    def require_model(self, name: str) -> None:
        """Raise ApiError 403 unless the model is allowed.

        Checked before the look-up, so that the error does not reveal which models exist.
        """
        if not self.may_use_model(name):
            message = f"This key may not use the model {name!r}."
            raise ApiError(403, message, "model_not_allowed", "model", "permission_error")

    def priority(self, asked: int | None) -> int:
        """Priority of a request.

        It is the key's priority, 0 without a key; a request may only lower its own rank. `asked` of None and
        0 change nothing. The box's own user may ask for any priority.
        """
        if self.is_background:
            return BACKGROUND_PRIORITY
        if self.kind in {"local", "session"}:
            return asked or 0
        own = 0 if self.key is None else self.key.priority
        return max(asked, own) if asked else own

    @property
    def tenant(self) -> str:
        """Tenant whose share of an engine and of its queue the requests use: the key's id. Callers without a
        key are one tenant.
        """
        return "" if self.key is None else self.key.id

    def cache_namespace(self, salt: str) -> str:
        """Namespace of the prefix cache.

        It isolates keys: one key's cached prefixes must not show in another's time to first token, whatever
        salt it sends. Nobody else's namespace begins with a key's id.
        """
        return f"{self.tenant}/{salt}" if self.tenant or salt else ""

    def rate_headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.meter is None else list(self.meter.headers())


NOBODY = Identity("nobody")
LOCAL = Identity("local")


@dataclass(slots=True)
class Security:
    """Keys, rate limits, sessions and sign-in of the daemon."""

    keys: KeyStore
    used: LastUsed
    quotas: QuotaLedger
    meters: KeyLimiters
    sessions: Sessions
    tokens: OneTimeTokens
    back_off: SignInBackoff
    wrong_keys: WrongKeyLimiter

    @classmethod
    def of(
        cls, keys_file: Path, used_file: Path, quota_file: Path, clock: Callable[[], float] = time.monotonic
    ) -> "Security":
        """Build from files. `clock` counts seconds and never goes back."""
        quotas = QuotaLedger(quota_file)
        return cls(
            KeyStore(keys_file),
            LastUsed(used_file),
            quotas,
            KeyLimiters(clock, quotas),
            Sessions(clock),
            OneTimeTokens(clock),
            SignInBackoff(clock),
            WrongKeyLimiter(clock),
        )

    def sign_in_link(self, url: str) -> str:
        """Make a link for one sign-in within 15 minutes. `url` is the daemon's, without a path."""
        return f"{url}{SIGN_IN_PATH}?token={self.tokens.make()}"

    def by_key(self, secret: str) -> Identity | None:
        key = self.keys.authenticate(secret)
        if key is None:
            return None
        self.used.note(key.id)
        return Identity("key", key, None, self.meters.of(key))

    def background_identity(self, owner: str) -> Identity | None:
        """Caller of a background request of `owner` (a key's id, or empty); None once the key is gone."""
        if not owner:
            return Identity("local", is_background=True)
        key = self.keys.by_id(owner)
        if key is None or key.is_expired():
            return None
        return Identity("key", key, None, self.meters.of(key), is_background=True)

    def by_session(self, secret: str) -> Identity | None:
        session = self.sessions.find(secret)
        if session is None or not self._is_valid(session):
            return None
        return Identity("session", None, session)

    def is_valid(self, identity: Identity) -> bool:
        """Return whether credentials are still valid: for streams that outlive a sign-out or a revoked
        key.
        """
        if identity.key is not None:
            return self.keys.by_digest(identity.key.digest) is not None
        return identity.session is None or self._is_valid(identity.session)

    def may_read(self, identity: Identity, owner: str) -> bool:
        """Return whether the caller may read prompts and answers of the key with the id `owner`.

        Other keys may not, nor sessions opened with one. Data without an owner is for administrators of the
        box.
        """
        if self.is_owner(identity) or not owner:
            return True
        key = self._key_of(identity)
        return key is not None and key.id == owner

    def owner_id(self, identity: Identity) -> str:
        """Id of the owner of data that this caller stores: its key's, also in a session opened with it; else
        empty.
        """
        return "" if (key := self._key_of(identity)) is None else key.id

    def _key_of(self, identity: Identity) -> ApiKey | None:
        digest = None if identity.session is None else identity.session.key_digest
        return identity.key if digest is None else self.keys.by_digest(digest)

    def is_owner(self, identity: Identity) -> bool:
        """Return whether it is the box's own user: over the unix socket, or signed in by a printed link."""
        if identity.session is not None:
            return identity.session.key_digest is None
        return identity.kind == "local"

    def revoke(self, name: str) -> ApiKey:
        """Revoke a key. Sessions and streams opened with it end too. Raises CliError (exit 4)."""
        key = self.keys.remove(name)
        self.meters.forget(key)
        self.used.forget(key.id)
        self.quotas.forget(key.id)
        return key

    def close(self) -> None:
        self.used.close()
        self.quotas.close()

    def _is_valid(self, session: Session) -> bool:
        """Return whether a session is valid. One opened with a key ends with the key."""
        if not self.sessions.is_alive(session):
            return False
        return session.key_digest is None or self.keys.by_digest(session.key_digest) is not None
