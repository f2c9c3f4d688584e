"""Web pages of other origins whose scripts may use the API, as far as `server.cors_origins` names them.

Off by default. No answer ever says that credentials are allowed: such a page has no session, and shows a key
where one is needed. What lies under /admin keeps refusing every foreign page.
"""

import re
from collections.abc import Iterable, Mapping

Header = tuple[bytes, bytes]

_ASKS = b"access-control-request-method"
_METHODS = b"GET, HEAD, POST, DELETE"
_NAMES = re.compile(rb"[A-Za-z0-9-]{1,64}(?: *, *[A-Za-z0-9-]{1,64}){0,63}")
_READABLE = (
    b"x-request-id, openai-processing-ms, retry-after, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_SECONDS = b"600"


class Cors:
    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    def allowed(self, path: str, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The request's foreign origin if the configuration lets it in here."""
        origin = headers.get(b"origin")
        if origin is None or origin.lower() not in self._origins or _is_admin(path):
            return None
        return origin


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """A browser's question before a request that a form could not have made."""
    return method == "OPTIONS" and _ASKS in headers


def readable_by(origin: bytes) -> list[Header]:
    """For every answer to an allowed page, errors included."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _READABLE),
        (b"vary", b"Origin"),
    ]


def preflight_headers(headers: Mapping[bytes, bytes]) -> list[Header]:
    """Any header may be sent: clients have many of their own, and none means anything to us but the keys."""
    found = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _SECONDS)]
    names = headers.get(b"access-control-request-headers", b"").strip()
    if _NAMES.fullmatch(names):
        found.append((b"access-control-allow-headers", names))
    if headers.get(b"access-control-request-private-network") == b"true":
        found.append((b"access-control-allow-private-network", b"true"))
    return found


def _is_admin(path: str) -> bool:
    """However many slashes stand before it: routes are found all the same."""
    return next((part for part in path.split("/") if part), "") == "admin"
