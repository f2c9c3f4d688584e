"""Identity of a caller, and its permissions."""

from dataclasses import dataclass
from typing import Literal

from ..errors import ApiError
from .keys import ApiKey, Scope
from .rate_limit import Meter
from .sessions import Session

BACKGROUND_PRIORITY = 1000
"""Added to the priority of a background request, which puts it behind every key's class."""
PANEL = "(panel)"
"""Name of panel sessions in the request log, where a key has its name; no key can have it."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Caller of a request. `local`: our own user over the unix socket. `nobody`: no credentials were sent."""

    kind: Literal["local", "session", "key", "nobody"]
    key: ApiKey | None = None
    session: Session | None = None
    meter: Meter | None = None
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
