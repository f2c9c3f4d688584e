"""Identity of a caller, and the guard at the root router: a route that does not say who may use it is closed.

| access   | nobody (loopback) | nobody | key             | session | unix socket |
| -------- | ----------------- | ------ | --------------- | ------- | ----------- |
| LIVENESS | yes               | yes    | yes             | yes     | yes         |
| SIGN_IN  | yes               | yes    | yes             | yes     | yes         |
| KNOWN    | yes               | no     | any             | yes     | yes         |
| READ     | yes               | no     | scope `read`    | yes     | yes         |
| INFER    | yes               | no     | scope `infer`   | yes     | yes         |
| STORED   | yes               | no     | scope `infer`   | yes     | yes         |
| ADMIN    | no                | no     | scope `admin`   | yes     | yes         |
| PAGE     | to the sign-in    | there  | scope `admin`   | yes     | yes         |

"Loopback" also means that the daemon listens nowhere else, that `server.require_key` is off, and that no
proxy shows: `is_keyless`.

Credentials come first: a wrong key is refused, never treated as no key.
"""

from enum import Enum
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import Scope as ConnectionScope

from ...errors import ApiError
from ...lifecycle.drain import Drain, shutting_down
from ...security.keys import PREFIX, Scope
from ...security.security import (
    ABSOLUTE,
    LOCAL,
    NOBODY,
    SIGN_IN_PATH,
    Identity,
    Security,
    Session,
    is_csrf_token,
)
from ...services import Services
from ..server.errors import error_type
from ..server.middleware import add_headers
from ..server.request import CALLER, form_of, is_form, is_local_socket, request_id
from ..server.sockets import address_group, is_loopback

Connection = ASGIConnection[Any, Any, Any, Any]

_FORWARDED = {b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"}
"""Headers that proxies add: the client may be anywhere, though the connection comes from this machine."""


def identify(connection: Connection) -> Identity:
    """Return the caller's identity; `nobody` for a connection without our credentials. Raises ApiError 401
    for an invalid key, 429 for many of them.
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
            client = connection.scope["client"]
            security.wrong_keys.take(address_group(client[0]) if client else "")
            raise unauthorized(
                "The API key is not valid: it is unknown, expired or revoked. `llmbox key ls` shows the "
                "keys of this server, `llmbox key add NAME` makes one."
            )
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


def services_and_owner(connection: Connection) -> tuple[Services, str]:
    """Return the daemon's services, and the id under which data of the caller's key are kept."""
    services: Services = connection.app.state.services
    return services, services.security.owner_id(identity_of(connection))


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


def cookie_name(scope: ConnectionScope) -> str:
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


def _find_key(scope: ConnectionScope) -> str | None:
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


def _is_forwarded(scope: ConnectionScope) -> bool:
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


class Access(Enum):
    """Access level of a route, set on each handler (or its router): `opt={"access": Access.INFER}`."""

    LIVENESS = "liveness"
    """Routes that report that the daemon answers, and nothing else."""
    SIGN_IN = "sign_in"
    """Routes of the sign-in, and the panel's static files: no user data."""
    KNOWN = "known"
    """Routes that every client needs: models, readiness, the API's description."""
    READ = "read"
    """Routes of state without content: metrics."""
    INFER = "infer"
    """Routes that are work for an engine; refused while draining."""
    STORED = "stored"
    """Routes for what the caller had stored: no work for an engine, so neither counted nor refused in a
    drain.
    """
    ADMIN = "admin"
    """Routes that change the daemon or show requests."""
    PAGE = "page"
    """Pages of the panel: same as ADMIN, but browsers are redirected to the sign-in."""


_SCOPES: dict[Access, Scope] = {
    Access.READ: "read",
    Access.INFER: "infer",
    Access.STORED: "infer",
    Access.ADMIN: "admin",
    Access.PAGE: "admin",
}
_OPEN = {Access.LIVENESS, Access.SIGN_IN}
_KEYLESS = {Access.KNOWN, Access.READ, Access.INFER, Access.STORED}
_OPENAI_FILES = "/v1/files"
"""Anthropic's API has other files at the same path."""
_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


async def default_deny(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    # Litestar answers OPTIONS itself, with the names of the methods.
    access = Access.KNOWN if connection.scope.get("method") == "OPTIONS" else handler.opt.get("access")
    if not isinstance(access, Access):
        raise _denied("This route is closed.")
    if is_form(connection) and not handler.opt.get("form"):
        raise ApiError(415, "This route accepts application/json.", "unsupported_media_type")
    if "anthropic-version" in connection.headers and connection.scope["path"].startswith(_OPENAI_FILES):
        raise ApiError(404, "Files are supported for OpenAI clients only.", "not_found")
    if access in _OPEN:
        return
    identity = identify(connection)
    connection.scope["state"]["identity"] = identity
    _require(connection, access, identity)
    if identity.session is not None:
        await _check_session(connection, identity.session)
    if access is Access.INFER:
        _check_work(connection, identity)


def _require(connection: ASGIConnection[Any, Any, Any, Any], access: Access, identity: Identity) -> None:
    if identity.kind == "nobody":
        if access not in _KEYLESS or not is_keyless(connection):
            raise _to_sign_in(connection) if access is Access.PAGE else _needs_key(access)
    elif (scope := _SCOPES.get(access)) is not None and not identity.may(scope):
        raise _denied(f"This key lacks the scope {scope!r}.", "insufficient_scope")


async def _check_session(connection: ASGIConnection[Any, Any, Any, Any], session: Session) -> None:
    """Check the CSRF token. The browser sends the cookie by itself; only our pages hold the token."""
    if connection.scope.get("method") not in _SAFE_METHODS:
        given = connection.headers.get("x-csrf-token")
        if given is None and is_form(connection):
            given = (await form_of(connection)).get("csrf_token")
        if given is None or not is_csrf_token(session, given):
            raise _denied("The page has expired: reload it.", "csrf_failed")
    if cookie := rotated_cookie(connection, session):
        add_headers(connection.scope, lambda: [cookie])


def _check_work(connection: ASGIConnection[Any, Any, Any, Any], identity: Identity) -> None:
    drain: Drain = connection.scope["state"]["drain"]
    if drain.draining:
        raise shutting_down()
    if identity.meter is None:
        return
    add_headers(connection.scope, identity.rate_headers)
    try:
        identity.meter.take_request()
    except ApiError as error:
        services: Services = connection.app.state.services
        services.gateway.record_refusal(
            request_id(connection), connection.scope["path"], "", error, key=identity.name
        )
        raise


def _needs_key(access: Access) -> ApiError:
    if access in {Access.ADMIN, Access.PAGE}:
        return unauthorized(
            "This route needs a key with the scope 'admin', a signed-in session, or the unix socket."
        )
    return unauthorized(
        "This server needs an API key, which `llmbox key add NAME` makes: Authorization: Bearer sk-llmbox-…"
    )


def _to_sign_in(connection: ASGIConnection[Any, Any, Any, Any]) -> ApiError:
    if "hx-request" in connection.headers:  # a fragment: the browser must leave the whole page
        error = _needs_key(Access.PAGE)
        error.headers["HX-Redirect"] = SIGN_IN_PATH
        return error
    return ApiError(
        303, "Sign in first.", "sign_in_needed", None, error_type(401), {"Location": SIGN_IN_PATH}
    )


def _denied(message: str, code: str = "permission_denied") -> ApiError:
    return ApiError(403, message, code, None, error_type(403))
