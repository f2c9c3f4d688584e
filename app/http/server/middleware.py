"""Outermost ASGI layer: checks and headers of every request, whether or not a route exists for it."""

import asyncio
import gzip
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from litestar.types import ASGIApp, Message, Receive, Send

from ...config.settings import LimitSettings
from ...errors import ApiError, unavailable
from ...gateway.request_times import ExchangeClock
from ...lifecycle.drain import Drain, shutting_down
from ...util.threads import off_loop
from .errors import ClientGone, allowed_methods, encode_error, error_type, to_api_error
from .origin import (
    Cors,
    Header,
    HostList,
    check_host,
    check_origin,
    is_from_browser,
    is_preflight,
    preflight_headers,
    readable_by,
)
from .request import CLOCK, FORM, WRITER, is_local_socket
from .sockets import BodyMemory

PER_TURN: Final = 2


class RequestPacer:
    """Queue that starts at most `PER_TURN` requests in a turn of the event loop, first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._started = 0
        """Number of requests started in this turn of the loop; 0: none since the last one."""

    async def turn(self) -> None:
        """Wait until this request may start."""
        if self._started < PER_TURN and not self._waiting:
            self._count()
            return
        start = asyncio.get_running_loop().create_future()
        self._waiting.append(start)
        await start

    def _count(self) -> None:
        if self._started == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._started += 1

    def _next_turn(self) -> None:
        self._started = 0
        while self._waiting and self._started < PER_TURN:
            start = self._waiting.popleft()
            if not start.done():  # its client has not left
                self._count()
                start.set_result(None)


logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_FORM_TYPE = b"application/x-www-form-urlencoded"
_UNPACED = frozenset({"/", "/health", "/ping", "/ready"})
"""Routes that are never paced: they are cheap, and clients use them to learn whether the daemon still
answers.
"""
_PDF_ROUTE = "/admin/api/chat/pdf"
_PDF_BYTES = 20_000_000
_FILE_ROUTE = "/v1/files"
"""Route whose bodies go to a file as they arrive."""
_UPLOAD_TYPES = {_FILE_ROUTE: b"multipart/form-data", _PDF_ROUTE: b"application/pdf"}
"""Media types of routes that take files, which may be larger than other bodies."""
_IMAGE_ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
        *("/v1/responses/input_tokens", "/api/chat", "/api/generate", "/tokenize", "/admin/api/chat"),
    }
)
"""Routes whose requests may have images."""
_CONVERSATIONS = "/admin/api/conversations/"
"""Prefix of routes that keep conversations of the panel's chat, with their images."""
_UNTYPED_ROUTES = "/api/"
"""Prefix of Ollama's routes, whose clients send any Content-Type or none. From a web page they need one, as
all routes do.
"""
_PACKED_ROUTES = "/admin"
"""Prefix of routes whose answers are compressed."""
_PACKED_TYPES = (b"text/html", b"application/json")
_LEAST_PACKED = 1400
"""Minimum size in bytes: smaller bodies fit into one packet uncompressed."""
_MORE_HEADERS = "more_headers"
_PAGE_REFERRER = (b"referrer-policy", b"same-origin")
"""Referrer policy of pages. Under no-referrer a browser would post our own forms with `Origin: null`, as if
from a foreign page.
"""
_SECURITY = [
    (
        b"content-security-policy",
        (
            b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
            b"frame-ancestors 'none'; form-action 'self'"
        ),
    ),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]


class SecurityMiddleware:
    """Checks of Host, Origin, Content-Type and body size; request id, security headers, HEAD and the last
    error handler.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: HostList,
        cors: Cors,
        limits: LimitSettings,
        drain: Drain,
    ) -> None:
        self._app, self._hosts, self._cors, self._drain = app, hosts, cors, drain
        self._body_bytes, self._file_bytes = limits.body_bytes, limits.file_bytes
        self._image_body_bytes = max(limits.image_body_bytes, limits.body_bytes)
        self._pacer = RequestPacer()
        self._bodies = BodyMemory(limits.open_body_bytes)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _RequestScope(scope, receive, send, self._limit(scope), self._drain, self._bodies)
        try:
            if scope["path"] not in _UNPACED and not is_local_socket(scope):
                await self._pacer.turn()
            if (preflight := self._screen(scope, exchange)) is not None:
                await exchange.answer(204, b"", preflight)
                return
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not self._drain.expired:
                raise
            await exchange.fail(shutting_down())
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a Rust library is not an Exception
            if not isinstance(error, ApiError):
                logger.exception("request %s failed", exchange.request_id)
            await exchange.fail(to_api_error(error))
        finally:
            exchange.release()

    def _limit(self, scope: Any) -> int:
        """Return the maximum size of the body in bytes."""
        path = scope["path"]
        if path == _FILE_ROUTE:
            return self._file_bytes
        limit = self._body_bytes
        if path == _PDF_ROUTE:
            limit = min(_PDF_BYTES, self._file_bytes)
        elif path in _IMAGE_ROUTES or path.startswith(_CONVERSATIONS):
            limit = self._image_body_bytes
        return min(limit, self._bodies.largest)

    def _screen(self, scope: Any, exchange: "_RequestScope") -> list[Header] | None:
        """Check the request. Returns headers for a CORS preflight of an allowed page, which is
        answered here.
        """
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        check_host(self._hosts, scope, hosts)
        origin = self._cors.allowed(scope["path"], exchange.headers)
        if origin is None:
            check_origin(self._hosts, scope, exchange.headers)
        else:
            add_headers(exchange.scope, lambda: readable_by(origin))
            if is_preflight(scope["method"], exchange.headers):
                return preflight_headers(exchange.headers)
        untyped = scope["path"].startswith(_UNTYPED_ROUTES) and not is_from_browser(exchange.headers)
        upload = _UPLOAD_TYPES.get(scope["path"])
        kind = _check_body(exchange.headers, self._limit(scope), untyped=untyped, upload=upload)
        exchange.scope["state"][FORM] = kind == _FORM_TYPE
        return None


def add_headers(scope: Any, make: Callable[[], Iterable[tuple[bytes, bytes]]]) -> None:
    """Add headers to the answer of this request; `make` is called when the answer begins."""
    scope["state"].setdefault(_MORE_HEADERS, []).append(make)


class _RequestScope:
    """One request and its answer, seen from outside the application."""

    def __init__(
        self, scope: Any, receive: Receive, send: Send, body_bytes: int, drain: Drain, bodies: BodyMemory
    ) -> None:
        self.headers = dict(reversed(scope["headers"]))
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else b"req_" + uuid.uuid4().hex.encode()
        self.started = False
        self._finished = False
        self._began = time.perf_counter()
        self._receive, self._send = receive, send
        self._limit = self._room = body_bytes
        self._body_done = False
        self._body_bytes = 0
        self._drain, self._bodies = drain, bodies
        self._client = scope["client"][0] if scope.get("client") else ""
        self._head = scope["method"] == "HEAD"
        accepted = self.headers.get(b"accept-encoding", b"")
        self._packs = b"gzip" in accepted and scope["path"].startswith(_PACKED_ROUTES)
        self._held: Any = None
        """Start of an answer that waits for its body, to be sent compressed."""
        # A copy: the server looks at its own scope's method to leave out the body.
        self.scope: Any = {
            **scope,
            "method": "GET" if self._head else scope["method"],
            "state": {
                **(scope.get("state") or {}),
                "request_id": self.request_id.decode(),
                "drain": drain,
                CLOCK: ExchangeClock(),
            },
        }

    def release(self) -> None:
        """Give the body's memory back."""
        self._bodies.release(self._client, self._body_bytes)

    def _hold(self, size: int) -> None:
        """Count received bytes. Raises ApiError 503 for a large body where open ones take too much."""
        if size and self.scope["path"] != _FILE_ROUTE:
            self._body_bytes += size
            if not self._bodies.add(self._client, size, self._body_bytes):
                raise _no_room()

    async def receive(self) -> Any:
        if self._finished:
            return {"type": "http.disconnect"}
        message: Any = await self._receive()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._room -= size
            self._body_done = not message.get("more_body", False)
            if self._room < 0:
                raise _too_large(self._limit)
            self._hold(size)
        elif not self._body_done:
            raise ClientGone
        return message

    async def send(self, message: Message) -> None:
        if self._finished:
            return
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = self._with_own(list(message.get("headers", [])))
            if self._packs and is_packable(message["headers"]):
                self._held = message
                return
            if not self._head:
                self.scope["state"][WRITER] = (self.scope.get("extensions") or {}).get(WRITER)
        elif self._held is not None:
            held, self._held = self._held, None
            if not message.get("more_body", False):
                whole, body = held, dict[str, Any](message)
                held, message = await off_loop(len(body.get("body", b"")), lambda: pack(whole, body))
            await self._send(held)
        if message["type"] == "http.response.body" and self._head:
            message = {"type": "http.response.body", "body": b"", "more_body": False}
            self._finished = True
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._finished = True
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Answer with the error if nothing was sent yet."""
        if self.started:
            return
        body = encode_error(error, self.scope["path"])
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self.answer(error.status, body, headers)

    async def answer(self, status: int, body: bytes, headers: list[Header]) -> None:
        """Send an answer without calling the application."""
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    def _with_own(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        names = {name.lower() for name, _ in headers}
        if b"allow" in names:
            scope = self.scope
            headers = [(k, allowed_methods(v, scope) if k.lower() == b"allow" else v) for k, v in headers]
        took = int((time.perf_counter() - self._began) * 1000)
        headers += [(b"x-request-id", self.request_id), (b"openai-processing-ms", b"%d" % took)]
        if any(name == b"content-type" and value.startswith(b"text/html") for name, value in headers):
            headers.append(_PAGE_REFERRER)
            names.add(_PAGE_REFERRER[0])
        headers += [pair for pair in _SECURITY if pair[0] not in names]
        for make in self.scope["state"].get(_MORE_HEADERS, ()):
            headers += make()
        if b"cache-control" not in names:
            headers.append((b"cache-control", b"no-store"))
        if self._drain.draining:
            headers.append((b"connection", b"close"))
        return headers


def is_packable(headers: Iterable[Header]) -> bool:
    """Return whether an answer is a whole text worth compressing. Streams have no length."""
    found = {name.lower(): value for name, value in headers}
    return (
        found.get(b"content-type", b"").startswith(_PACKED_TYPES)
        and b"content-encoding" not in found
        and int(found.get(b"content-length", b"0")) >= _LEAST_PACKED
    )


def pack(start: Any, body: Any) -> tuple[Any, Any]:
    """Compress the one body of an answer. Cookies are SameSite=Strict: no other page can have a guess of its
    own compressed together with a token.
    """
    packed = gzip.compress(body.get("body", b""), 5, mtime=0)
    kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    more = [(b"content-length", b"%d" % len(packed)), (b"content-encoding", b"gzip")]
    headers = [*kept, *more, (b"vary", b"Accept-Encoding")]
    return {**start, "headers": headers}, {**body, "body": packed}


def _check_body(
    headers: dict[bytes, bytes], limit: int, *, untyped: bool, upload: bytes | None
) -> bytes | None:
    """Return the body's media type, None without a body. The guard checks whether the route takes forms.

    `untyped`: a body is JSON whatever its type says, as for Ollama. `upload`: it may have this type too,
    whose parameters its reader checks.
    """
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise ApiError(400, "The Content-Length header is not a number.", "invalid_header")
    if len(length) > 18 or int(length) > limit:
        raise _too_large(limit)
    if int(length) == 0 and b"transfer-encoding" not in headers:
        return None
    kind, _, parameters = headers.get(b"content-type", b"").partition(b";")
    charset = parameters.strip().lower().replace(b'"', b"")
    kind = kind.strip().lower()
    if untyped:
        kind = b"application/json"
    is_upload = kind == upload
    if not is_upload and (
        kind not in {b"application/json", _FORM_TYPE} or charset not in {b"", b"charset=utf-8"}
    ):
        raise _unsupported("Bodies must be sent with Content-Type: application/json.")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise _unsupported("Compressed bodies are not supported.")
    return kind


def _unsupported(message: str) -> ApiError:
    return ApiError(415, message, "unsupported_media_type")


def _no_room() -> ApiError:
    return unavailable(
        "The bodies of open requests take too much memory (limits.open_body_bytes). Try again later.",
        "too_many_large_bodies",
        retry_after=5,
    )


def _too_large(limit: int) -> ApiError:
    message = (
        f"The request body is too large: at most {limit:,} bytes are allowed (limits.body_bytes, "
        "limits.image_body_bytes for chats, limits.file_bytes for files, and limits.open_body_bytes for all "
        "open requests, which follows from the memory)."
    )
    return ApiError(413, message, "request_too_large", None, error_type(413))
