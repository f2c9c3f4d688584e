"""The session's cookie. Not `Secure`: llmbox speaks plain HTTP, and browsers would not send it back."""

from typing import Any

from litestar.connection import ASGIConnection

from ..security.sessions import ABSOLUTE, Session
from ..services import Services
from .credentials import cookie_name

_ATTRIBUTES = "Path=/; HttpOnly; SameSite=Strict"


def session_cookie(connection: ASGIConnection[Any, Any, Any, Any], secret: str) -> tuple[bytes, bytes]:
    """As a header."""
    name = cookie_name(connection.scope)
    return b"set-cookie", f"{name}={secret}; Max-Age={int(ABSOLUTE)}; {_ATTRIBUTES}".encode()


def no_cookie(connection: ASGIConnection[Any, Any, Any, Any]) -> tuple[bytes, bytes]:
    return b"set-cookie", f"{cookie_name(connection.scope)}=; Max-Age=0; {_ATTRIBUTES}".encode()


def rotated_cookie(
    connection: ASGIConnection[Any, Any, Any, Any], session: Session
) -> tuple[bytes, bytes] | None:
    services: Services = connection.app.state.services
    secret = services.security.sessions.rotate(session)
    return None if secret is None else session_cookie(connection, secret)
