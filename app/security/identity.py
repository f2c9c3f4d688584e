"""Who asks, and what they may."""

from dataclasses import dataclass
from typing import Literal

from ..errors import ApiError
from .keys import ApiKey, Scope
from .rate_limit import Meter
from .sessions import Session

BACKGROUND_PRIORITY = 1000
"""Behind every key's class."""
PANEL = "(panel)"
"""In the request log, in place of a key's name; no key can be called so."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`local`: our own user over the unix socket. `nobody`: no credentials were shown."""

    kind: Literal["local", "session", "key", "nobody"]
    key: ApiKey | None = None
    session: Session | None = None
    meter: Meter | None = None
    is_background: bool = False
    """Nobody waits for the answer: everybody else goes first."""

    @property
    def name(self) -> str:
        """For the request log."""
        if self.key is not None:
            return self.key.name
        return PANEL if self.kind == "session" else ""

    def keeps_content(self, *, keyless: bool) -> bool:
        """Whether prompt and answer may be kept. `keyless`: what holds for callers without a key."""
        return keyless if self.key is None else self.key.log_content

    def may(self, scope: Scope) -> bool:
        """As far as credentials go; what is open to `nobody` is the guard's to say."""
        return self.kind in {"local", "session"} or (self.key is not None and self.key.allows(scope))

    def may_use_model(self, name: str) -> bool:
        return self.key is None or self.key.allows_model(name)

    def require_model(self, name: str) -> None:
        """Asked before the look-up: the answer does not tell what exists. Raises ApiError 403."""
        if not self.may_use_model(name):
            message = f"This key may not use the model {name!r}."
            raise ApiError(403, message, "model_not_allowed", "model", "permission_error")

    def priority(self, asked: int | None) -> int:
        """The class of the caller's key, from which a request may only step back; 0 without a key. None and 0
        ask for nothing. The box's own user may ask for any.
        """
        if self.is_background:
            return BACKGROUND_PRIORITY
        if self.kind in {"local", "session"}:
            return asked or 0
        own = 0 if self.key is None else self.key.priority
        return max(asked, own) if asked else own

    @property
    def tenant(self) -> str:
        """Whose share of an engine, and whose room in its queue, the requests take: a key's id. Callers
        without a key are one.
        """
        return "" if self.key is None else self.key.id

    def cache_namespace(self, salt: str) -> str:
        """What one key computed must not show in another's time to first token, whatever salt it sends.

        Nobody else's namespace begins with a key's id.
        """
        return f"{self.tenant}/{salt}" if self.tenant or salt else ""

    def rate_headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.meter is None else list(self.meter.headers())


NOBODY = Identity("nobody")
LOCAL = Identity("local")
