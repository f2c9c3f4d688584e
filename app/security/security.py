"""Identity of a caller with its permissions, and the facade of all access control: `services.security`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ApiError
from .key_store import KeyStore, LastUsed
from .keys import ApiKey, Scope, Tier
from .quotas import QuotaLedger
from .rate_limit import KeyLimiter, KeyLimiters, WrongKeyLimiter
from .sessions import PATH, OneTimeTokens, Session, Sessions, SignInBackoff

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
        return f"{url}{PATH}?token={self.tokens.make()}"

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
