"""Server-sent events for generations and for the event feed.

Three tasks of one stream: `_pump` takes events from the source, `_watch` notices that the client left, and
the request's own task begins and ends the answer. In between `_write_ready` writes to the socket without a
switch to that task, unless the client does not read. What became ready together goes out in one write.
Nothing else runs per event, because at many streams the daemon shares its cores with the engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.types import Receive, Scope, Send

from ...errors import ApiError
from ...gateway.request_times import ExchangeClock
from ...lifecycle.drain import Drain, shutting_down
from .errors import ClientGone, encode_error, to_api_error
from .request import CLOCK, WRITER

T = TypeVar("T")


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled at once when the client leaves (`ClientGone`).

    Call it after the body was read: `await while_connected(request.receive, gateway.complete(...))`.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(until_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        del task  # its error's traceback leads to this frame: a circle, which would keep the whole body


@contextlib.asynccontextmanager
async def ended_by_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block, in the task that runs it, when the client leaves; then raise `ClientGone`."""
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        await until_disconnect(receive)
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watching.cancel()


logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
COMMENT = b": ping\n\n"
_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
encode = msgspec.json.Encoder().encode


def data_event(value: Any) -> bytes:
    """Encode `value` (a msgspec struct or plain data) as one event."""
    return b"data: %b\n\n" % encode(value)


TEXT_MARK = "\x00"
"""Text of an event whose other bytes are to be kept (`split_at_text`)."""


def split_at_text(event: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before and behind `TEXT_MARK` in an event, to join them with encoded texts."""
    before, _, after = event.partition(encode(TEXT_MARK))
    return before, after


def error_event(error: ApiError) -> bytes:
    return b"data: %b\n\n" % encode_error(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class SseOptions:
    """Timing and framing of a stream. `first_comment` and `keep_alive` are seconds of silence.

    An `endless` stream does not end by itself: it is closed when a drain begins, without `last`.
    """

    first_comment: float = 1.0
    keep_alive: float = 4.5
    last: bytes = DONE
    error: Callable[[ApiError], bytes] = error_event
    comment: bytes = COMMENT
    """Comment sent during silence; empty where the format has no comments."""
    content_type: bytes = b"text/event-stream; charset=utf-8"
    endless: bool = False


DEFAULT_OPTIONS = SseOptions()


class EventStreamResponse(Response[Any]):
    """Streaming answer of a handler: `EventStreamResponse(source)`; `source` yields framed events
    (`data_event`).

    An `ApiError` before the first event becomes an ordinary error answer with its status, if it comes
    within `first_comment` seconds; later ones become `data: {"error": ...}`. `last` ([DONE]) is added here.
    The source is closed (aclose) as soon as the client leaves.
    """

    def __init__(self, source: AsyncIterator[bytes], options: SseOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(None, media_type="text/event-stream")
        self.source = source
        self.options = options

    def to_asgi_response(self, app: Any = None, request: Any = None, **_: Any) -> Any:  # noqa: ARG002
        room = request.app.state.stream_buffer_bytes // 2  # the other half is on its way to the socket
        return EventStream(self.source, self.options, room)


class EventStream:
    """ASGI application of one stream. `room`: bytes of events kept while the client does not read."""

    def __init__(self, source: AsyncIterator[bytes], options: SseOptions, room: int) -> None:
        self._source = source
        self._options = options
        self._max_size = room
        self._buffer: list[bytes] = []
        self._size = 0
        self._ended = False
        self._gone = False
        self._error: ApiError | None = None
        self._wake: asyncio.Future[None] | None = None
        """Future that the request's own task waits for; None while it sends."""
        self._write: Callable[[bytes], bool] | None = None
        """Writer of the begun answer (`protocol.py`); None where there is no socket."""
        self._room: asyncio.Future[None] | None = None
        self._started = False
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        drain: Drain | None = scope["state"].get("drain")
        self._state = scope["state"]
        self._clock: ExchangeClock | None = self._state.get(CLOCK)
        pump = self._loop.create_task(self._pump())
        watch = self._loop.create_task(self._watch(receive, pump))
        if drain and self._options.endless:
            drain.register_endless(self._end)
            if drain.draining:
                self._end()
        self._timer = self._loop.call_later(self._options.first_comment, self._keep_alive)
        try:
            while not self._gone and not self._ended:
                self._wake = self._loop.create_future()
                await self._wake
                self._wake = None
                while self._buffer and not self._gone and not self._ended:
                    await self._flush(send)
            if not self._gone:
                await self._finish(send)
        except asyncio.CancelledError:
            if not (drain and drain.expired):
                raise
            self._error = shutting_down()
            await self._finish(send)
        finally:
            self._timer.cancel()
            if drain:
                drain.unregister_endless(self._end)
            self._error = None  # its traceback leads to this object: the circle would keep the body
            await self._close(pump, watch)

    async def _pump(self) -> None:
        try:
            async for event in self._source:
                if not self._buffer:
                    self._loop.call_soon(self._write_ready)
                self._buffer.append(event)
                self._size += len(event)
                if self._size >= self._max_size:
                    await self._wait_for_room()
        except Exception as error:  # a stream never ends without an error or its last event
            self._error = to_api_error(error)
            if self._error is not error:
                logger.exception("a stream failed")
        finally:
            self._end()

    async def _wait_for_room(self) -> None:
        full_at = self._loop.time()
        self._room = self._loop.create_future()
        try:
            await self._room
        finally:  # also where the client leaves without having read
            if self._clock is not None:
                now = self._loop.time()
                self._clock.stalls.append((now, now - full_at))

    async def _watch(self, receive: Receive, pump: asyncio.Task[None]) -> None:
        await until_disconnect(receive)
        self._gone = True
        pump.cancel()
        self._notify()

    def _write_ready(self) -> None:
        """Write the buffer, or have the request's own task send it."""
        if self._wake is None or self._ended or not self._buffer:
            return  # that task takes it
        if self._write is None or not self._write(b"".join(self._buffer)):
            self._notify()
            return
        self._buffer.clear()
        self._size = 0
        self._last_write = self._loop.time()
        if self._room is not None:
            self._make_room()

    async def _flush(self, send: Send) -> None:
        body = b"".join(self._buffer)
        self._buffer.clear()
        self._size = 0
        if not self._started:
            await self._start(send)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._last_write = self._loop.time()
        if self._room is not None:
            self._make_room()

    def _make_room(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    async def _finish(self, send: Send) -> None:
        """Send the rest of the buffer, the error if there is one, and the last event, in one write."""
        if self._error and not self._started and not self._buffer:
            raise self._error
        self._ended = True
        parts, self._buffer = self._buffer, []
        if self._error:
            parts.append(self._options.error(self._error))
        if not self._started:
            await self._start(send)
        body = b"".join((*parts, self._options.last))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, send: Send) -> None:
        self._started = True
        headers = [(b"content-type", self._options.content_type), *_HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._write = self._state.get(WRITER)

    def _keep_alive(self) -> None:
        """Send comments while there is silence. One timer a stream looks when the last write was, instead of
        being re-armed by every event. Nothing is added behind a write that waits for its reader: it may be
        the last event.
        """
        silence = self._loop.time() - self._last_write
        wait = self._options.keep_alive - silence
        if wait <= 0 or not self._started:
            if self._wake is not None and not self._buffer and self._options.comment:
                self._buffer.append(self._options.comment)
                self._write_ready()
            wait = self._options.keep_alive
        self._timer = self._loop.call_later(wait, self._keep_alive)

    def _end(self) -> None:
        self._ended = True
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _close(self, pump: asyncio.Task[None], watch: asyncio.Task[None]) -> None:
        """Close the source even if this task is cancelled: closing is what makes the gateway abort."""
        pump.cancel()
        watch.cancel()
        await asyncio.wait((pump, watch))
        if close := getattr(self._source, "aclose", None):
            with contextlib.suppress(Exception):
                await close()
