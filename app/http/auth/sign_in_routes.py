"""Signing in to the panel and out of it.

The link's GET only shows a button: whatever looks at links before people do (mail scanners, previews, a
browser's guess at the next page) must not use it up.
"""

import logging
from html import escape

from litestar import MediaType, Response, get, post
from litestar.params import FromQuery
from litestar.types import ControllerRouterHandler

from ...errors import ApiError
from ...security.keys import ApiKey
from ...security.security import SIGN_IN_PATH, Security
from ..server.errors import card_page
from ..server.middleware import add_headers
from ..server.request import StrictRequest, form_of
from .guard import Access, identity_of, no_cookie, session_cookie, session_identity

log = logging.getLogger("llmbox.security")

HOME = "/admin"
_MOST_TOKEN_CHARACTERS = 200


@get(
    SIGN_IN_PATH,
    media_type=MediaType.HTML,
    sync_to_thread=False,
    opt={"access": Access.SIGN_IN},
    include_in_schema=False,
)
def sign_in_page(request: StrictRequest, token: FromQuery[str] = "") -> Response[str]:
    """Show a button where the link has a token, otherwise the form for an admin key."""
    security = request.services.security
    if not token and session_identity(request, security) is not None:
        return _go(HOME)
    return _page(token=token[:_MOST_TOKEN_CHARACTERS])


@post(
    SIGN_IN_PATH,
    media_type=MediaType.HTML,
    status_code=303,
    opt={"access": Access.SIGN_IN, "form": True},
    include_in_schema=False,
)
async def sign_in(request: StrictRequest) -> Response[str]:
    """Open a session for a one-time token or an admin key."""
    security = request.services.security
    form = await form_of(request)
    address = request.client.host if request.client else "unix socket"
    try:
        security.back_off.check(address)
    except ApiError as error:
        return _page(error.message, status=error.status, headers=error.headers)
    allowed, key = _check(security, form)
    if not allowed:
        security.back_off.record_failure(address)
        log.warning("a sign-in from %s failed", address)
        return _page(
            "Sign-in failed: the link was used or has expired, or the key lacks the scope admin.", status=401
        )
    security.back_off.record_success(address)
    log.info("signed in from %s with %s", address, f"the key {key.name}" if key else "a one-time link")
    if (old := session_identity(request, security)) is not None and old.session is not None:
        security.sessions.close(old.session)
    _, secret = security.sessions.open(key.digest if key else None)
    add_headers(request.scope, lambda: [session_cookie(request, secret)])
    return _go(HOME)


@post(
    "/admin/signout",
    media_type=MediaType.HTML,
    status_code=303,
    opt={"access": Access.PAGE, "form": True},
    include_in_schema=False,
)
async def sign_out(request: StrictRequest) -> Response[str]:
    session = identity_of(request).session
    if session is not None:
        request.services.security.sessions.close(session)
    add_headers(request.scope, lambda: [no_cookie(request)])
    return _go(SIGN_IN_PATH)


sign_in_routes: list[ControllerRouterHandler] = [sign_in_page, sign_in, sign_out]


def _check(security: Security, form: dict[str, str]) -> tuple[bool, ApiKey | None]:
    if form.get("token"):
        return security.tokens.use(form["token"]), None
    key = security.keys.authenticate(form.get("key", "").strip())
    return key is not None and key.allows("admin"), key


def _go(where: str) -> Response[str]:
    return Response("", status_code=303, headers={"Location": where}, media_type=MediaType.HTML)


def _page(
    message: str = "", *, token: str = "", status: int = 200, headers: dict[str, str] | None = None
) -> Response[str]:
    said = f'<p class="failure" role="alert">{escape(message)}</p>' if message else ""
    inner = _LINK_FORM.format(token=escape(token, quote=True)) if token else _KEY_FORM
    body = card_page("Sign in", said + inner)
    return Response(body, status_code=status, headers=headers, media_type=MediaType.HTML)


_LINK_FORM = """<form method="post" action="/admin/signin">
<input type="hidden" name="token" value="{token}">
<p>This link signs this browser in, once.</p>
<button class="main" type="submit" autofocus>Sign in</button>
</form>"""
_KEY_FORM = """<form method="post" action="/admin/signin">
<label for="key">Key with the scope admin</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button class="main" type="submit">Sign in</button>
</form>
<p>At the box itself: <code>llmbox up</code> prints a sign-in link.</p>"""
