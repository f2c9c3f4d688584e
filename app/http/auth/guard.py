"""Authorization guard at the root router: a route that does not say who may use it is closed.

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
proxy shows: `credentials.is_keyless`.
"""

from enum import Enum
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from ...errors import ApiError
from ...lifecycle.drain import Drain, shutting_down
from ...security.identity import Identity
from ...security.keys import Scope
from ...security.sessions import PATH, Session, is_csrf_token
from ...services import Services
from ..server.errors import error_type
from ..server.middleware import add_headers
from ..server.request import form_of, is_form, request_id
from .credentials import identify, is_keyless, rotated_cookie, unauthorized


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
        raise ApiError(415, "This route takes application/json.", "unsupported_media_type")
    if "anthropic-version" in connection.headers and connection.scope["path"].startswith(_OPENAI_FILES):
        raise ApiError(404, "Files are kept for OpenAI's clients only.", "not_found")
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
    return unauthorized("This server needs an API key: Authorization: Bearer sk-llmbox-…")


def _to_sign_in(connection: ASGIConnection[Any, Any, Any, Any]) -> ApiError:
    if "hx-request" in connection.headers:  # a fragment: the browser must leave the whole page
        error = _needs_key(Access.PAGE)
        error.headers["HX-Redirect"] = PATH
        return error
    return ApiError(303, "Sign in first.", "sign_in_needed", None, error_type(401), {"Location": PATH})


def _denied(message: str, code: str = "permission_denied") -> ApiError:
    return ApiError(403, message, code, None, error_type(403))
