"""HTTP/1.1 protocol: uvicorn's httptools protocol, with the limits that it lacks.

uvicorn's has no time-out for headers or bodies, takes header lines of any length, never gives up on a reader
that does not read, and answers its own refusals in plain text. Measurements: docs/notes/asgi-servers.md.
"""

import asyncio
import os
import socket
import struct
import time
from email.utils import formatdate
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ...config.settings import LimitSettings
from ...errors import ApiError
from .errors import encode_error
from .origin import take_target
from .request import LOCAL, WRITER
from .sockets import ConnectionLimiter

_DISCARD_BODIES = 8
"""Bound on bytes discarded after an early answer, in bodies of the largest size: a reset would destroy the
answer.
"""
_READ_BYTES = 1 << 16
"""Bytes read at once: each connection may have as many before its request is looked at."""
_FRAMING_BYTES = 65_536
"""Bytes allowed for chunk sizes, extensions and trailers of one body, beside 16 for each byte of content."""
_RETRY_WHEN_FULL = "5"
_LINGER = 5.0
"""Seconds that a refused client has to read its answer and close. Closing while it still sends would reset
the connection, which destroys the answer.
"""
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class DatedState(ServerState):
    """State that the connections of one server share. The Date header is made when needed, not by a timer."""

    _second = 0

    def __init__(self, most_lingering: int = 64) -> None:
        super().__init__()
        self.room_to_linger = most_lingering
        """Refused connections that may still be added to those that wait for their clients to close."""

    def refresh_date(self) -> None:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


class Phase(Enum):
    """Part of a request that the client is sending."""

    NOTHING = auto()
    HEADERS = auto()
    BODY = auto()


class LimitedProtocol(HttpToolsProtocol):
    """One connection. It has two timers: one for data that the client must send, one for data that it must
    read.
    """

    def __init__(
        self, config: Config, state: DatedState, limits: LimitSettings, limiter: ConnectionLimiter
    ) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._state = state
        self._limits = limits
        largest = max(limits.body_bytes, limits.image_body_bytes)
        self._most_discarded = max(_DISCARD_BODIES * limits.body_bytes, 2 * largest, limits.file_bytes)
        self._limiter = limiter
        self._deadline: asyncio.TimerHandle | None = None
        self._write_watch: asyncio.TimerHandle | None = None
        self._extensions: dict[str, Any] = {}
        self._phase = Phase.NOTHING
        self._line_bytes = 0
        self._discarded = 0
        self._received = 0
        """Received bytes of the body in progress, framing included."""
        self._body_bytes = 0
        self._is_body_new = False
        """True from the headers of a request until the first part of its body was looked at."""
        self._refused = False
        self._open_cycles: list[RequestResponseCycle] = []
        """Exchanges without a whole answer, in order. uvicorn knows the last one only."""
        self._lingers: asyncio.TimerHandle | None = None

    # ---- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = _READ_BYTES
        if _is_own_unix_peer(transport):
            self._extensions = {LOCAL: {}}
        elif not self._limiter.admit(self, self.client[0] if self.client else ""):
            self._refuse(_too_many_connections())
            return
        self._expect(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disconnect_cycles()
        self._limiter.release(self)
        self._expect(None)
        self._unset_keepalive_if_required()
        if self._write_watch is not None:
            self._write_watch.cancel()
        if self._lingers is not None:
            self._lingers.cancel()
            self._state.room_to_linger += 1

    def give_way(self) -> None:
        """Close silently after a whole request. Otherwise answer with an error: a first request may be on its
        way.
        """
        if self._phase is Phase.NOTHING and self.cycle is not None:
            self.transport.close()
        else:
            self._refuse(_too_many_connections())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._phase is not Phase.BODY and self.cycle.response_complete:
            self._limiter.mark_idle(self)

    # ---- time-outs of what the client must send: headers, then a body

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        began_before = self._phase is Phase.HEADERS
        self._received += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._refused or self.transport.is_closing():
            return
        if self._phase is Phase.BODY and self._is_body_new:
            self._is_body_new = False
            self.flow.pause_reading()  # until the application asks for the body
            self.cycle.transport = cast("Any", _BodyTransport(self))
        if self._phase is Phase.HEADERS:
            self._count_line(data, began_before)
        elif self._phase is Phase.BODY and self._received > _FRAMING_BYTES + 16 * self._body_bytes:
            message = "The body's chunk extensions and trailers are too large."
            self._refuse(ApiError(413, message, "body_too_large"))
            return
        idle = self._phase is Phase.NOTHING and (not self.cycle or self.cycle.response_complete)
        if self._deadline is None and (idle or self._phase is Phase.HEADERS):
            self._expect(self._limits.header_timeout)

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while (end := self._parse(rest)) is not None and not self._refused:
                self._decline_upgrade()
                rest = rest[end:]
        except httptools.HttpParserError:
            self._refuse(ApiError(400, "The request is not valid HTTP.", "bad_request"))

    def _parse(self, data: memoryview) -> int | None:
        """Parse bytes. Returns the end of a request that offers another protocol, None where none does."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            offset: int = upgrade.args[0]
            return offset
        return None

    def _decline_upgrade(self) -> None:
        """Parse the request again without its `Upgrade`: the parser takes the body for another protocol.

        Java's HttpClient offers h2c with every request, bodies included.
        """
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                value = b"close" if b"close" in value.lower() else b"keep-alive"  # noqa: PLW2901
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"".join((*head, b"\r\n")))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = Phase.HEADERS
        self._discarded = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.header_line_bytes:
            self._refuse(_header_too_large("The request line is too long."))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(name) + len(value) + 4 > self._limits.header_line_bytes:
            self._refuse(_header_too_large("A header line is too long."))
        elif len(self.headers) > self._limits.header_count:
            self._refuse(_header_too_large("There are too many headers."))

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        self.url = take_target(self.url, self.headers)
        if not self.url.startswith(b"/") or self.parser.get_method() == b"CONNECT":
            message = "The request target must be a path or an http URL."
            self._refuse(ApiError(400, message, "bad_request"))
            return
        if self.parser.should_upgrade():
            return  # `_decline_upgrade` follows
        self._phase = Phase.BODY
        self._received = self._body_bytes = 0
        self._is_body_new = True
        self._limiter.mark_busy(self)
        self._expect(self._limits.body_timeout)
        self._state.refresh_date()
        super().on_headers_complete()
        self._open_cycles = [each for each in self._open_cycles if not each.response_complete]
        self._open_cycles.append(self.cycle)
        scope: Any = self.scope
        scope["extensions"] = {**self._extensions, WRITER: partial(_write_part, self.cycle)}

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_bytes += len(body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self._most_discarded:
                self.transport.abort()

    def on_message_complete(self) -> None:
        if self._refused or self.parser.should_upgrade():
            return
        self._phase = Phase.NOTHING
        self._expect(None)
        super().on_message_complete()
        if self.cycle.response_complete:
            self._limiter.mark_idle(self)

    def _count_line(self, data: bytes, began_before: bool) -> None:
        """Bound an unfinished line, which never reaches `on_header`."""
        end = data.rfind(b"\n")
        if end >= 0:
            self._line_bytes = len(data) - end - 1
        else:  # a request that began after `data` has no line in it yet
            self._line_bytes = self._line_bytes + len(data) if began_before else 0
        if self._line_bytes > self._limits.header_line_bytes:
            self._refuse(_header_too_large("A header line is too long."))

    def _expect(self, seconds: float | None) -> None:
        """Set the time within which the client must send the next thing. None: nothing is due."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # reading is paused by us: an earlier answer comes first
            self._expect(self._limits.body_timeout)
            return
        what = "body" if self._phase is Phase.BODY else "headers"
        self._refuse(ApiError(408, f"The request's {what} took too long.", "request_timeout"))

    # ---- time-outs of what the client should read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_watch is not None:
            self._write_watch.cancel()
            self._write_watch = None

    def _watch_writes(self, unread: int) -> None:
        self._write_watch = self.loop.call_later(self._limits.stream_timeout, self._check_writes, unread)

    def _check_writes(self, unread_before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread >= unread_before:
            self.transport.abort()
        else:
            self._watch_writes(unread)

    # ---- answers of our own

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application and close. Send nothing where an answer was begun."""
        if self._refused or self.transport.is_closing():
            return
        can_answer = self._can_answer()
        self._refused = True
        self._expect(None)
        if can_answer:
            body = encode_error(error)
            headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
            lines = [f"{name.lower()}: {value}\r\n" for name, value in headers.items()]
            head = "".join((*lines, "connection: close\r\n\r\n")).encode("latin-1")
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._disconnect_cycles()
        self._close_gently()

    def close_after_answer(self) -> None:
        """Close after the last answer to a client, which may still be sending its body."""
        if self._phase is not Phase.BODY:
            self.transport.close()
        elif not self._refused:
            self._refused = True
            self._expect(None)
            self._close_gently()

    def _disconnect_cycles(self) -> None:
        """Tell the application that nobody reads its answers any more."""
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _close_gently(self) -> None:
        """End our side; read on and discard until the client has closed too, or for `_LINGER` seconds."""
        if not self._state.room_to_linger:
            self.transport.close()
            return
        self._state.room_to_linger -= 1
        self._lingers = self.loop.call_later(_LINGER, self.transport.abort)
        self.transport.resume_reading()
        if self.transport.can_write_eof():  # TLS cannot: its client reads the answer's end by its length
            self.transport.write_eof()

    def _can_answer(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None:
            return True
        if self._phase is Phase.BODY:  # the cycle is that of the request being sent
            return not self.pipeline and not cycle.response_started
        return cycle.response_complete


class _BodyTransport:
    """Transport for the answer to a request whose body has not arrived. Closing it does not reset the
    connection.
    """

    def __init__(self, protocol: LimitedProtocol) -> None:
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing
        self.close = protocol.close_after_answer


def _write_part(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a part of a begun stream at once, as uvicorn's `send` would. False: use `send`, which waits for a
    client that does not read.
    """
    if cycle.disconnected or not body:  # an empty chunk would end the answer
        return True
    if cycle.flow.write_paused or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


def _is_own_unix_peer(transport: asyncio.Transport) -> bool:
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def _too_many_connections() -> ApiError:
    return ApiError(
        503,
        "Too many open connections.",
        "too_many_connections",
        None,
        "server_error",
        {"Retry-After": _RETRY_WHEN_FULL},
    )


def _header_too_large(message: str) -> ApiError:
    return ApiError(431, message, "headers_too_large")
