"""Error answers: the one place where exceptions become answers, for every route and every status.

Errors have OpenAI's shape; on Anthropic's and Ollama's routes they have the shape of those APIs.
"""

import http
import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException, NotFoundException, ValidationException

from ...errors import ApiError, unavailable
from ...store.record import StoreError

logger = logging.getLogger(__name__)


class ClientGone(Exception):  # noqa: N818 - nothing went wrong on our side
    """The client closed its connection: no answer can be sent."""


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OLLAMA_ROUTES = "/api/"
_ANTHROPIC_ROUTES = "/v1/messages"
_MODELS_ROUTES = "/v1/models"
NO_THREADS = "thread_unsupported_request"
"""Code of an error whose details tell Anthropic's clients to go on by sending whole conversations."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_CARD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>{title} · llmbox</title>
<link rel="icon" href="/admin/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/admin/static/panel.css">
</head>
<body class="gate">
<main>
<h1><img src="/admin/static/icon.svg" alt="" width="28" height="28"> llmbox</h1>
{inner}
</main>
</body>
</html>
"""
_NO_PAGE = """<p>The panel has no page at this address.</p>
<p><a class="button main" href="/admin">Open the panel</a></p>"""
_MESSAGES = {
    404: "There is no such route. The routes are listed at /openapi.json.",
    405: "This route does not support the request's method.",
    413: "The request body is too large.",
}
_BASE_URL = (
    "There is no such route, but there is {}. Correct the client's base URL: OpenAI's clients need it with "
    "/v1 at the end, Anthropic's and Ollama's without."
)


def card_page(title: str, inner: str) -> str:
    """Return a page outside the panel's frame: one card, for whoever is not signed in. `inner` is HTML."""
    return _CARD.format(title=title, inner=inner)


def wants_page(request: Request[Any, Any, Any]) -> bool:
    """Return whether a browser asks for a page to show."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


def to_api_error(error: BaseException) -> ApiError:
    """Map an exception to the error that the client gets. No text of an unexpected exception reaches it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StoreError):
        return _log_unavailable(error)
    if isinstance(error, ValidationException):
        return _bad_parameter(error)
    if isinstance(error, HTTPException) and error.status_code < 500:
        status = http.HTTPStatus(error.status_code)
        message = _MESSAGES.get(status, f"{status.phrase}.")
        if allowed := (error.headers or {}).get("allow"):
            message += f" It supports {', '.join(sorted(set(allowed.split(', ')) - {'OPTIONS'}))}."
        code = "_".join(status.phrase.lower().replace("-", " ").split())
        return ApiError(status, message, code, None, error_type(status), dict(error.headers or {}))
    return ApiError(500, "Something went wrong inside llmbox.", "internal_error", None, "server_error")


def _log_unavailable(error: StoreError) -> ApiError:
    message = f"The request log cannot be used now: {error}"
    return unavailable(message, "request_log_unavailable", retry_after=5)


def error_type(status: int) -> str:
    return "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")


def encode_error(error: ApiError, path: str = "") -> bytes:
    """Encode an error in the shape that clients of the route at `path` expect."""
    if path.startswith(_OLLAMA_ROUTES):
        return msgspec.json.encode({"error": error.message})
    return msgspec.json.encode(_anthropic(error) if path.startswith(_ANTHROPIC_ROUTES) else error.body())


def _anthropic(error: ApiError) -> dict[str, Any]:
    """Build Anthropic's error object, with llmbox's code and field beside its two keys."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    data: dict[str, Any] = {"type": kind, "message": error.message, "code": error.code, "param": error.param}
    if error.code == NO_THREADS:
        data["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": data}


def answer(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer any exception: Litestar's exception handler for all of them."""
    result = to_api_error(error)
    if isinstance(error, NotFoundException) and (meant := _meant_route(request)):
        result.message = _BASE_URL.format(meant)
    if result.status == 500 and not isinstance(error, ApiError | ClientGone):
        logger.error(
            "request %s failed: %s",
            request.scope.get("state", {}).get("request_id"),
            type(error).__name__,
            exc_info=error,
        )
    path = request.scope["path"]
    is_panel = path.startswith("/admin/") and not path.startswith("/admin/api/")
    if result.status == 404 and is_panel and isinstance(error, HTTPException) and wants_page(request):
        page = card_page("No such page", _NO_PAGE).encode()
        return Response(page, status_code=404, media_type="text/html; charset=utf-8")
    of_models = path.startswith(_MODELS_ROUTES) and is_anthropic_client(request)
    if of_models or (path.startswith("/v1/") and "anthropic-version" in request.headers):
        path = _ANTHROPIC_ROUTES
    return Response(
        encode_error(result, path),
        status_code=result.status,
        headers=result.headers,
        media_type="application/json",
    )


def _meant_route(request: Request[Any, Any, Any]) -> str:
    """Return the route that a client with a wrong base URL meant; empty where there is none."""
    path = request.scope["path"].rstrip("/")
    meant = (f"/v1{path}", path.removeprefix("/v1"))
    return next((route.path for route in request.app.routes if route.path in meant), "")


def _bad_parameter(error: ValidationException) -> ApiError:
    extra = error.extra
    first: Any = extra[0] if isinstance(extra, list) and extra else {}
    key = str(first.get("key", "")) or None
    if key == "data":
        return ApiError(400, "This route needs a JSON body.", "invalid_json")
    text = str(first.get("message", "invalid value")).replace("`", "")
    where = f" for '{key}'" if key else ""
    return ApiError(400, f"Invalid value{where}: {text[:1].lower()}{text[1:]}.", "invalid_value", key)


def is_anthropic_client(connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
    return "anthropic-version" in connection.headers or "x-api-key" in connection.headers


def allowed_methods(allow: bytes, scope: Any) -> bytes:
    """Return an Allow header with all methods of a path: OPTIONS, HEAD wherever GET is, and those of all
    handlers, where Litestar's answer to OPTIONS has those of the first one.
    """
    routes = scope["litestar_app"].routes if "litestar_app" in scope else ()
    found = [route for route in routes if route.path_format == scope.get("path_template")]
    known = {method.encode() for route in found for method in getattr(route, "methods", ())}
    methods = {method.strip() for method in allow.split(b",")} | known | {b"OPTIONS"}
    return b", ".join(sorted(methods | ({b"HEAD"} if b"GET" in methods else set())))
