"""Facade of all access control: `services.security`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .identity import Identity
from .key_store import KeyStore, LastUsed
from .keys import ApiKey
from .quotas import QuotaLedger
from .rate_limit import Meters
from .sessions import PATH, BackOff, OneTimeTokens, Session, Sessions


@dataclass(slots=True)
class Security:
    """Keys, rate limits, sessions and sign-in of the daemon."""

    keys: KeyStore
    used: LastUsed
    quotas: QuotaLedger
    meters: Meters
    sessions: Sessions
    tokens: OneTimeTokens
    back_off: BackOff

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
            Meters(clock, quotas),
            Sessions(clock),
            OneTimeTokens(clock),
            BackOff(clock),
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
        key = next((each for each in self.keys.list() if each.id == owner), None)
        if key is None or not self.keys.is_good(key.digest):
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
            return self.keys.is_good(identity.key.digest)
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
        return next((each for each in self.keys.list() if each.digest == digest), identity.key)

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
        return session.key_digest is None or self.keys.is_good(session.key_digest)
