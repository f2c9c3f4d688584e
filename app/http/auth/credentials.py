"""Credentials of a connection and the identity behind them. A wrong key is refused, never treated
as no key.
"""

from typing import Any

from litestar.connection import ASGIConnection
from litestar.types import Scope

from ...errors import ApiError
from ...security.identity import LOCAL, NOBODY, Identity
from ...security.keys import PREFIX
from ...security.security import Security
from ...security.sessions import ABSOLUTE, Session
from ...services import Services
from ..server.request import CALLER, is_local_socket
from ..server.sockets import is_loopback

Connection = ASGIConnection[Any, Any, Any, Any]

_FORWARDED = {b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"}
"""Headers that proxies add: the client may be anywhere, though the connection comes from this machine."""


def identify(connection: Connection) -> Identity:
    """Return the caller's identity; `nobody` for a connection without our credentials. Raises ApiError 401
    for an invalid key.
    """
    services: Services = connection.app.state.services
    security = services.security
    extensions: dict[str, Any] = connection.scope.get("extensions") or {}
    if isinstance(own := extensions.get(CALLER), Identity):
        return own
    secret = _find_key(connection.scope)
    if secret is not None:
        found = security.by_key(secret)
        if found is None:
            raise unauthorized("The API key is not valid: it is unknown, expired or revoked.")
        return found
    if is_local_socket(connection) and not _is_forwarded(connection.scope):
        return LOCAL
    return session_identity(connection, security) or NOBODY


def session_identity(connection: Connection, security: Security) -> Identity | None:
    cookie = connection.cookies.get(cookie_name(connection.scope))
    return security.by_session(cookie) if cookie else None


def identity_of(connection: Connection) -> Identity:
    """Return the identity that the guard found. Only for routes behind the guard that are not open to
    everybody.
    """
    found: Identity = connection.scope["state"]["identity"]
    return found


def csrf_token(connection: Connection) -> str:
    """Return the token that this session's pages send back with every change; empty without a session."""
    session: Session | None = identity_of(connection).session
    return "" if session is None else session.csrf_token


def is_keyless(connection: Connection) -> bool:
    """Return True if no key is needed: only on this machine, and only while nobody else can connect."""
    services: Services = connection.app.state.services
    if services.settings.server.require_key or not connection.app.state.loopback_only:
        return False
    peer = connection.scope["client"]
    return peer is not None and is_loopback(peer[0]) and not _is_forwarded(connection.scope)


def cookie_name(scope: Scope) -> str:
    """Return the session cookie's name. It has the port in it: cookies know none, and several daemons may
    serve one machine.
    """
    server = scope["server"]
    return f"llmbox_{server[1]}" if server and server[1] else "llmbox"


def unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        "invalid_api_key",
        None,
        "authentication_error",
        {"WWW-Authenticate": 'Bearer realm="llmbox"'},
    )


def _find_key(scope: Scope) -> str | None:
    """Return a key of ours from `Authorization: Bearer` or `x-api-key`. Clients that need no key may send
    anything.
    """
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    others = [value for name, value in scope["headers"] if name == b"x-api-key"]
    if len(given) > 1 or len(others) > 1:
        raise unauthorized("The request carries more than one key.")
    tokens = [_bearer(value) for value in given] + [value.decode("latin-1").strip() for value in others]
    ours = {token for token in tokens if token.startswith(PREFIX)}
    if len(ours) > 1:
        raise unauthorized("The request carries more than one key.")
    return ours.pop() if ours else None


def _is_forwarded(scope: Scope) -> bool:
    return any(name in _FORWARDED for name, _ in scope["headers"])


def _bearer(value: bytes) -> str:
    scheme, _, token = value.decode("latin-1").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


_ATTRIBUTES = "Path=/; HttpOnly; SameSite=Strict"


def session_cookie(connection: ASGIConnection[Any, Any, Any, Any], secret: str) -> tuple[bytes, bytes]:
    """Build the `Set-Cookie` header of a session."""
    name = cookie_name(connection.scope)
    secure = "; Secure" if connection.scope["scheme"] == "https" else ""
    return b"set-cookie", f"{name}={secret}; Max-Age={int(ABSOLUTE)}; {_ATTRIBUTES}{secure}".encode()


def no_cookie(connection: ASGIConnection[Any, Any, Any, Any]) -> tuple[bytes, bytes]:
    return b"set-cookie", f"{cookie_name(connection.scope)}=; Max-Age=0; {_ATTRIBUTES}".encode()


def rotated_cookie(
    connection: ASGIConnection[Any, Any, Any, Any], session: Session
) -> tuple[bytes, bytes] | None:
    services: Services = connection.app.state.services
    secret = services.security.sessions.rotate(session)
    return None if secret is None else session_cookie(connection, secret)
