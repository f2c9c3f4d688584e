"""Everything about access in one place: `services.security`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .identity import Identity
from .key_store import KeyStore
from .keys import Key
from .last_used import LastUsed
from .rates import Meters
from .sessions import Session, Sessions
from .sign_in import PATH, BackOff, OneTimeTokens


@dataclass(slots=True)
class Security:
    keys: KeyStore
    used: LastUsed
    meters: Meters
    sessions: Sessions
    tokens: OneTimeTokens
    back_off: BackOff

    @classmethod
    def of(cls, keys_file: Path, used_file: Path, clock: Callable[[], float] = time.monotonic) -> "Security":
        """`clock` counts seconds and never goes back."""
        return cls(
            KeyStore(keys_file),
            LastUsed(used_file),
            Meters(clock),
            Sessions(clock),
            OneTimeTokens(clock),
            BackOff(clock),
        )

    def sign_in_link(self, url: str) -> str:
        """A new one: good for one sign-in within 15 minutes. `url` is the daemon's, without a path."""
        return f"{url}{PATH}?token={self.tokens.make()}"

    def by_key(self, secret: str) -> Identity | None:
        key = self.keys.authenticate(secret)
        if key is None:
            return None
        self.used.note(key.id)
        return Identity("key", key, None, self.meters.of(key))

    def by_session(self, secret: str) -> Identity | None:
        session = self.sessions.find(secret)
        if session is None or not self._is_valid(session):
            return None
        return Identity("session", None, session)

    def is_valid(self, identity: Identity) -> bool:
        """Whether it still holds: for streams that outlive a sign-out or a revoked key."""
        if identity.key is not None:
            return self._is_good(identity.key.digest)
        return identity.session is None or self._is_valid(identity.session)

    def revoke(self, name: str) -> Key:
        """Raises CliError (exit 4). Sessions and streams that were opened with the key end too."""
        key = self.keys.remove(name)
        self.meters.forget(key)
        self.used.forget(key.id)
        return key

    def close(self) -> None:
        self.used.close()

    def _is_valid(self, session: Session) -> bool:
        """One opened with a key lives no longer than the key does."""
        if not self.sessions.is_alive(session):
            return False
        return session.key_digest is None or self._is_good(session.key_digest)

    def _is_good(self, digest: str) -> bool:
        return any(key.digest == digest and not key.is_expired() for key in self.keys.list())
