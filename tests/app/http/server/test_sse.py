"""Event streams over a hand-driven ASGI connection."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from litestar import get

from llmbox.app.errors import ApiError
from llmbox.app.gateway.request_times import ExchangeClock
from llmbox.app.http.auth.guard import Access
from llmbox.app.http.server.request import CLOCK, WRITER
from llmbox.app.http.server.sse import COMMENT, DONE, EventStream, EventStreamResponse, SseOptions, data_event
from llmbox.app.lifecycle.drain import Drain
from support.http_app import client, make_app

QUIET = SseOptions(first_comment=60, keep_alive=60)
ROOM = 1000


class Connection:
    """Collects what is sent; `leave` is the client closing; `gate` closed is a client that does not read."""

    def __init__(self, drain: Drain | None = None) -> None:
        self.scope: dict[str, Any] = {"type": "http", "state": {"drain": drain}}
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self.gate = asyncio.Event()
        self.news = asyncio.Event()
        self.gate.set()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.gate.wait()
        self.sent.append(message)
        self.news.set()

    async def wait_for_bodies(self, count: int) -> None:
        while len(self.bodies) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 90)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]

    @property
    def text(self) -> bytes:
        return b"".join(self.bodies)

    @property
    def finished(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    def start(self, source: AsyncIterator[bytes], options: SseOptions = QUIET) -> asyncio.Task[None]:
        stream = EventStream(source, options, ROOM)
        return asyncio.ensure_future(stream(self.scope, self.receive, self.send))  # type: ignore[arg-type]


class Source:
    """Events as the test hands them in; remembers how it ended."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.taken = 0
        self.closed = False

    async def events(self) -> AsyncIterator[bytes]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self.taken += 1
                yield item
        finally:
            self.closed = True


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_events_then_done() -> None:
    async def events() -> AsyncIterator[bytes]:
        for number in range(3):
            yield data_event({"n": number})
            await asyncio.sleep(0)

    connection = Connection()
    await connection.start(events())
    assert connection.text == b'data: {"n":0}\n\ndata: {"n":1}\n\ndata: {"n":2}\n\n' + DONE
    assert connection.finished
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"cache-control"] == b"no-store"


async def test_events_ready_together_are_one_write() -> None:
    connection, source = Connection(), Source()
    task = connection.start(source.events())
    for number in range(5):
        source.queue.put_nowait(b"data: %d\n\n" % number)
    await settle()
    assert connection.bodies == [b"".join(b"data: %d\n\n" % number for number in range(5))]
    source.queue.put_nowait(b"data: last\n\n")
    source.queue.put_nowait(None)
    await task
    assert connection.bodies[1:] == [b"data: last\n\n" + DONE]


@pytest.mark.parametrize("reads", [True, False])
async def test_parts_go_to_the_socket_at_once_if_the_client_reads(reads: bool) -> None:
    """The first part comes after the headers and the last one with the end: both are sent by the task."""
    connection, source, written = Connection(), Source(), []

    def write(body: bytes) -> bool:
        written.append(body)
        return reads

    connection.scope["state"][WRITER] = write
    task = connection.start(source.events())
    for part in (b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"):
        source.queue.put_nowait(part)
        await settle()
    source.queue.put_nowait(b"data: 4\n\n")
    source.queue.put_nowait(None)
    await task
    assert written == [b"data: 2\n\n", b"data: 3\n\n"]
    sent = [b"data: 1\n\n", *([] if reads else written), b"data: 4\n\n" + DONE]
    assert connection.bodies == sent


async def test_nothing_is_written_behind_the_end() -> None:
    drain = Drain()
    connection, source, written = Connection(drain), Source(), []
    connection.scope["state"][WRITER] = lambda body: written.append(body) or True
    task = connection.start(source.events())
    source.queue.put_nowait(b"data: 1\n\n")
    await settle()
    drain.expired = True
    connection.gate.clear()  # the end waits for the reader; meanwhile the source goes on
    task.cancel()
    await settle()
    source.queue.put_nowait(b"data: 2\n\n")
    await settle()
    connection.gate.set()
    await task
    assert written == []
    assert connection.text.endswith(DONE)


async def test_silence_is_filled_with_comments() -> None:
    connection, source = Connection(), Source()
    task = connection.start(source.events(), SseOptions(first_comment=0.01, keep_alive=0.01))
    await connection.wait_for_bodies(3)
    assert set(connection.bodies) == {COMMENT}
    source.queue.put_nowait(None)
    await task


async def test_no_comment_follows_the_last_event_of_a_slow_reader() -> None:
    """Anthropic's comments are events: one behind `message_stop` would begin something new."""
    connection, ends, ended = Connection(), asyncio.Event(), asyncio.Event()
    connection.gate.clear()

    async def source() -> AsyncIterator[bytes]:
        yield b"data: last\n\n"
        await ends.wait()
        ended.set()

    stream = EventStream(source(), SseOptions(first_comment=60, keep_alive=60, last=b""), ROOM)
    task = asyncio.create_task(stream(connection.scope, connection.receive, connection.send))  # type: ignore[arg-type]
    while not stream._started:  # noqa: ASYNC110 - the write waits for the reader from then on
        await asyncio.sleep(0)
    ends.set()
    await ended.wait()
    stream._keep_alive()
    connection.gate.set()
    await task
    assert connection.text == b"data: last\n\n"


async def test_a_refusal_before_the_first_event_is_an_ordinary_error() -> None:
    @get("/stream", opt={"access": Access.INFER})
    async def stream() -> EventStreamResponse:
        async def events() -> AsyncIterator[bytes]:
            raise ApiError(429, "The queue is full.", "queue_full", headers={"Retry-After": "3"})
            yield b""

        return EventStreamResponse(events())

    async with client(make_app([stream])) as http:
        answer = await http.get("/stream")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ApiError(503, "Engine lost.", "engine_failed"), b"Engine lost."),
        (RuntimeError("/secret"), b"internal_error"),
    ],
)
async def test_an_error_in_the_middle_is_told_in_the_stream(error: Exception, words: bytes) -> None:
    connection, source = Connection(), Source()
    task = connection.start(source.events())
    for item in (b"data: 1\n\n", error):
        source.queue.put_nowait(item)
    await task
    assert connection.text.startswith(b'data: 1\n\ndata: {"error":{')
    assert connection.text.endswith(DONE)
    assert words in connection.text
    assert b"secret" not in connection.text
    assert connection.finished


async def test_a_client_that_leaves_closes_the_source_at_once() -> None:
    connection, source = Connection(), Source()
    task = connection.start(source.events())
    source.queue.put_nowait(b"data: 1\n\n")
    await settle()
    connection.left.set()
    await settle()
    assert source.closed
    assert task.done()
    assert connection.text == b"data: 1\n\n"


async def test_leaving_while_not_reading_closes_the_source_too() -> None:
    connection, source = Connection(), Source()
    connection.gate.clear()
    task = connection.start(source.events())
    source.queue.put_nowait(b"data: 1\n\n")
    await settle()
    connection.left.set()
    await settle()
    assert source.closed
    connection.gate.set()  # the server lets writes to a closed connection go through
    await task


async def test_a_reader_that_does_not_read_stops_the_source() -> None:
    connection, source = Connection(), Source()
    connection.gate.clear()
    task = connection.start(source.events())
    for _ in range(1000):
        source.queue.put_nowait(b"x" * 100)
    source.queue.put_nowait(None)
    await settle()
    assert source.taken * 100 <= 3 * ROOM
    connection.gate.set()
    await task
    assert connection.text == b"x" * 100_000 + DONE


@pytest.mark.parametrize("leaves", [False, True])
async def test_waits_for_a_reader_are_timed(leaves: bool) -> None:
    connection, source = Connection(), Source()
    clock = connection.scope["state"][CLOCK] = ExchangeClock()
    connection.gate.clear()
    task = connection.start(source.events())
    for _ in range(20):
        source.queue.put_nowait(b"x" * 100)
    source.queue.put_nowait(None)
    await settle()
    assert not clock.stalls
    (connection.left if leaves else connection.gate).set()
    await settle()
    connection.gate.set()
    await task
    assert clock.stalls
    assert all(0 < seconds <= end - clock.began for end, seconds in clock.stalls)


async def test_cancelling_passes_through_and_closes_the_source() -> None:
    connection, source = Connection(), Source()
    task = connection.start(source.events())
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed


async def test_an_expired_drain_ends_with_an_error_object() -> None:
    drain = Drain()
    connection, source = Connection(drain), Source()
    task = connection.start(source.events())
    source.queue.put_nowait(b"data: 1\n\n")
    await settle()
    drain.begin()
    await settle()
    assert not task.done()
    drain.expired = True
    task.cancel()
    await task
    assert b'"code":"shutting_down"' in connection.text
    assert connection.text.endswith(DONE)
    assert source.closed


async def test_an_endless_stream_ends_when_the_drain_begins() -> None:
    drain = Drain()
    connection, source = Connection(drain), Source()
    task = connection.start(source.events(), SseOptions(endless=True, last=b""))
    source.queue.put_nowait(b"data: 1\n\n")
    await settle()
    drain.begin()
    await asyncio.wait_for(task, 90)
    assert connection.text == b"data: 1\n\n"
    assert connection.finished


async def test_an_error_before_the_first_event_keeps_nothing_of_the_request() -> None:
    """Without the garbage collector: a full collection is rare, and a request's body may be large."""

    class Body:
        pass

    async def source(body: Body) -> AsyncIterator[bytes]:
        raise ApiError(400, f"no {body}")
        yield b""

    async def fail() -> weakref.ref[Body]:
        body, connection = Body(), Connection()
        try:
            await connection.start(source(body))
        except ApiError:
            return weakref.ref(body)
        raise AssertionError

    gc.disable()
    try:
        kept = await fail()
        await asyncio.sleep(0)
        assert kept() is None
    finally:
        gc.enable()
