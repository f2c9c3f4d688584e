"""Requests that the daemon sends to its own routes, without a connection: batches, and tools of MCP."""

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from ..batches import RouteAnswer
from ..errors import ApiError
from ..security.security import Identity
from ..services import Services
from .server.errors import encode_error
from .server.request import CALLER


async def send_in_process(app: Any, path: str, body: bytes, owner: str) -> RouteAnswer:
    """POST a JSON body as a background request of `owner` (a key's id; empty: this machine's own user)."""
    services: Services = app.state.services
    caller = services.security.background_identity(owner)
    if caller is None:
        gone = ApiError(
            401,
            "The key of this batch was revoked or has expired.",
            "invalid_api_key",
            None,
            "authentication_error",
        )
        return RouteAnswer(status=gone.status, body=encode_error(gone, path))
    return await call_route(app, "POST", path, body, caller)


async def call_route(
    app: Any,
    method: str,
    path: str,
    body: bytes,
    caller: Identity,
    *,
    query: Mapping[str, Any] | None = None,
    client: tuple[str, int] = ("batch", 0),
) -> RouteAnswer:
    """Send a request to a route as `caller`, whom its guard checks like everybody."""
    exchange = _InProcessExchange(body)
    headers = [(b"host", b"llmbox")]
    if body:
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    question = urlencode(query or {}).encode()
    scope = http_scope(method, path, question, headers, caller, client=client, server=("batch", None))
    await app(scope, exchange.receive, exchange.send)
    return exchange.answer()


def http_scope(
    method: str,
    path: str,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    caller: Identity,
    *,
    client: tuple[str, int],
    server: tuple[str, int | None],
) -> dict[str, Any]:
    """Return the ASGI scope of a request without a connection, sent by `caller`."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": client,
        "server": server,
        "extensions": {CALLER: caller},
        "state": {},
    }


class _InProcessExchange:
    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()  # there is no connection to lose: the task is cancelled instead
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.lower(): value for name, value in message.get("headers", ())}
        else:
            self._pieces.append(message.get("body", b""))

    def answer(self) -> RouteAnswer:
        after = self._headers.get(b"retry-after", b"")
        return RouteAnswer(
            status=self._status,
            body=b"".join(self._pieces),
            request_id=self._headers.get(b"x-request-id", b"").decode("latin-1"),
            retry_after=float(after) if after.isdigit() else None,
        )
