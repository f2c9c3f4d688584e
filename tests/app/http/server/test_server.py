"""The real server: sockets, keep-alive, drain."""

import asyncio
import itertools
import json
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from litestar import get, post
from litestar.params import JSONBody

from llmbox.app.http.auth.guard import Access
from llmbox.app.http.server.protocol import LimitedProtocol
from llmbox.app.http.server.request import WRITER, StrictRequest, is_local_socket
from llmbox.app.http.server.server import serve
from llmbox.app.http.server.sockets import listen_tcp, listen_unix
from llmbox.app.http.server.sse import EventStreamResponse, while_connected
from support.http_app import fake_services, make_app
from support.http_server import running


@get("/where", opt={"access": Access.READ})
async def where(request: StrictRequest) -> dict[str, bool]:
    return {"local": is_local_socket(request)}


class Hanging:
    """Routes that answer when told, and remember that they were stopped."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.stopped = asyncio.Event()

    async def _wait(self) -> None:
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise

    @property
    def handlers(self) -> list[object]:
        @get("/stream", opt={"access": Access.INFER})
        async def stream() -> EventStreamResponse:
            async def events() -> AsyncIterator[bytes]:
                yield b"data: first\n\n"
                await self._wait()
                yield b"data: last\n\n"

            return EventStreamResponse(events())

        @get("/answer", opt={"access": Access.INFER})
        async def answer(request: StrictRequest) -> str:
            await while_connected(request.receive, self._wait())
            return "whole answer"

        return [stream, answer]


async def test_three_sockets_share_the_loop_and_only_one_is_local(tmp_path: Path) -> None:
    services = fake_services()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/s"
        sockets = [*listen_tcp("127.0.0.1", 0), listen_unix(Path(path))]
        port = sockets[0].getsockname()[1]
        hosts = [sock.getsockname()[0] for sock in sockets[:-1]]
        app = make_app([where], services)
        task = asyncio.create_task(serve(app, sockets, limits=services.settings.limits, drain=services.drain))
        request = b"GET /where HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"
        for host in hosts:
            reader, writer = await asyncio.open_connection(host, port)
            name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            writer.write(request % name.encode())
            assert b'{"local":false}' in await reader.read()
            writer.close()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(request % b"localhost")
        assert b'{"local":true}' in await reader.read()
        writer.close()
        services.drain.begin()
        await asyncio.wait_for(task, 90)


async def test_small_writes_are_sent_at_once() -> None:
    nodelay: list[int] = []

    class App:
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    made = LimitedProtocol.connection_made

    def connection_made(self: LimitedProtocol, transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        nodelay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LimitedProtocol, "connection_made", connection_made)
        async with running(app=App()) as server:
            await server.send(server.get("/", "Connection: close"))
    assert nodelay == [1]


async def test_one_connection_carries_many_requests() -> None:
    async with running() as server:
        reader, writer = await server.connect()
        for _ in range(3):
            writer.write(server.get("/health"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"date: " in head
            assert await reader.readexactly(15) == b'{"status":"ok"}'
        writer.write(server.get("/health") * 2)  # pipelined
        await reader.readuntil(b'{"status":"ok"}')
        await reader.readuntil(b'{"status":"ok"}')
        writer.close()


async def test_the_host_of_an_absolute_target_counts_not_the_header() -> None:
    async with running() as server:
        own, hosts = f"localhost:{server.port}", f"Host: localhost:{server.port}\r\n"
        for target, header, status in (
            (f"http://{own}/health", "Host: evil.example\r\n", 200),
            (f"HTTP://{own}/health?a=1", hosts, 200),
            (f"https://{own}/health", "", 200),
            (f"http://{own}", hosts, 200),
            (f"http://{own}?a=1", hosts, 200),
            ("http://evil.example/health", hosts, 421),
            (f"http://evil.example:{server.port}/health", hosts, 421),
            (f"http://{own}@evil.example/health", hosts, 400),
            (f"http://{own}/health", hosts * 2, 400),
            (f"http://a@{own}/health", hosts, 400),
            ("http:///health", hosts, 400),
            (f"ftp://{own}/health", hosts, 400),
        ):
            answer = await server.send(f"GET {target} HTTP/1.1\r\n{header}Connection: close\r\n\r\n".encode())
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (target, answer)


async def test_bad_syntax_is_400() -> None:
    async with running() as server:
        for data in (
            b"NONSENSE\r\n\r\n",
            b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"CONNECT / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        ):
            answer = await server.send(data)
            assert answer.startswith(b"HTTP/1.1 400 "), (data, answer)
            assert set(json.loads(answer.split(b"\r\n\r\n")[1])["error"]) == {
                "message",
                "type",
                "param",
                "code",
            }


@pytest.mark.parametrize(
    "extra",
    [
        "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAA\r\n",
        "Connection: upgrade\r\nUpgrade: websocket\r\n",
        "Expect: 100-continue\r\n",
    ],
)
async def test_offers_of_other_protocols_lose_nothing(extra: str) -> None:
    @post("/echo", status_code=200, opt={"access": Access.INFER})
    async def echo(data: JSONBody[dict[str, str]]) -> str:
        return data["text"]

    body = b'{"text": "whole"}'
    async with running([echo]) as server:
        head = (
            f"POST /echo HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{extra}\r\n"
        ).encode()
        for pieces in ([head + body], [head, body], [head + body[:5], body[5:]]):
            reader, writer = await server.connect()
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            await asyncio.wait_for(reader.readuntil(b"whole"), 90)
            writer.write(server.get("/health"))
            await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 90)
            writer.close()


async def test_many_offers_of_other_protocols_in_one_packet_are_all_answered() -> None:
    async with running() as server:
        head = server.get("/health").removesuffix(b"\r\n")
        offer = head + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        reader, writer = await server.connect()
        writer.write(offer * 2000)
        for _ in range(2000):
            await asyncio.wait_for(reader.readuntil(b'{"status":"ok"}'), 90)
        writer.close()


@pytest.mark.parametrize("size", [10_000, 20_000_000])
async def test_an_early_answer_survives_a_large_upload(size: int) -> None:
    async with running(body_bytes=2000) as server:
        body = b"a" * size
        head = f"POST /x HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
        answer = await server.send(
            head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        assert answer.startswith(b"HTTP/1.1 413 ")


async def test_little_is_read_of_a_body_that_nobody_asks_for_yet() -> None:
    entered, go_on, read = asyncio.Event(), asyncio.Event(), []

    @post("/wait", status_code=200, opt={"access": Access.INFER})
    async def wait(request: StrictRequest) -> dict[str, int]:
        entered.set()
        await go_on.wait()
        read.append(len(request.scope["extensions"][WRITER].args[0].body))
        return {"length": len(await request.body())}

    async with running([wait], body_bytes=5_000_000, open_body_bytes=100_000_000) as server:
        reader, writer = await server.connect()
        head = f"POST /wait HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: 5000000\r\n\r\n" + b" " * 5_000_000)
        await asyncio.wait_for(entered.wait(), 90)
        other, other_writer = await server.connect()
        other_writer.write(server.get("/health"))
        await asyncio.wait_for(other.readuntil(b'{"status":"ok"}'), 90)
        go_on.set()
        assert (await asyncio.wait_for(reader.readuntil(b"}"), 90)).endswith(b'{"length":5000000}')
        writer.close()
        other_writer.close()
    assert read[0] <= 1 << 16


@pytest.mark.parametrize("pipelined", ["", "/health"])
@pytest.mark.parametrize("path", ["/stream", "/answer"])
async def test_a_client_that_leaves_stops_the_work(path: str, pipelined: str) -> None:
    hanging = Hanging()
    async with running(hanging.handlers) as server:
        _, writer = await server.connect()
        writer.write(server.get(path) + (server.get(pipelined) if pipelined else b""))
        await asyncio.wait_for(hanging.entered.wait(), 90)
        writer.transport.abort()
        await asyncio.wait_for(hanging.stopped.wait(), 90)


async def test_bad_syntax_behind_a_request_stops_its_work_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hanging = Hanging()
    async with running(hanging.handlers) as server:
        reader, writer = await server.connect()
        writer.write(server.get("/answer"))
        await asyncio.wait_for(hanging.entered.wait(), 90)
        writer.write(server.get("/health") + b"NONSENSE\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 90) == b""
        await asyncio.wait_for(hanging.stopped.wait(), 90)
        writer.close()
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize("path", ["/stream", "/answer"])
async def test_a_drain_lets_open_work_finish(path: str) -> None:
    hanging = Hanging()
    async with running(hanging.handlers) as server:
        reader, writer = await server.connect()
        idle_reader, _ = await server.connect()
        writer.write(server.get(path))
        await asyncio.wait_for(hanging.entered.wait(), 90)
        server.services.drain.begin()
        assert await asyncio.wait_for(idle_reader.read(), 90) == b""
        told = await server.send(server.get("/ready"))
        assert told.startswith(b"HTTP/1.1 503 ")
        assert b"draining" in told
        hanging.release.set()
        answer = await asyncio.wait_for(reader.read(), 90)
        assert b"last" in answer or b"whole answer" in answer
        await asyncio.wait_for(server.task, 90)
        with pytest.raises(OSError):
            await server.connect()
        writer.close()


@pytest.mark.parametrize("hurry", [True, False])
@pytest.mark.parametrize("path", ["/stream", "/answer"])
async def test_work_that_outlives_the_drain_ends_with_an_error(path: str, hurry: bool) -> None:
    hanging = Hanging()
    async with running(hanging.handlers, drain_timeout=60 if hurry else 0.05) as server:
        reader, writer = await server.connect()
        writer.write(server.get(path))
        await asyncio.wait_for(hanging.entered.wait(), 90)
        server.services.drain.begin()
        if hurry:
            server.services.drain.begin()
        answer = await asyncio.wait_for(reader.read(), 90)
        assert b'"code":"shutting_down"' in answer
        if path == "/stream":
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        else:
            assert answer.startswith(b"HTTP/1.1 503 ")
        await asyncio.wait_for(server.task, 90)
        assert hanging.stopped.is_set()
        writer.close()


async def test_a_flowing_reader_cannot_hold_the_end() -> None:
    flowing = asyncio.Event()

    @get("/flood", opt={"access": Access.INFER})
    async def flood() -> EventStreamResponse:
        async def events() -> AsyncIterator[bytes]:
            for count in itertools.count():
                if count * 10_000 > 1_000_000:  # it flows; how much the kernel takes is its own affair
                    flowing.set()
                yield b"x" * 10_000

        return EventStreamResponse(events())

    async with running([flood], drain_timeout=0.1) as server:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.sendall(server.get("/flood"))
        await asyncio.wait_for(flowing.wait(), 90)
        server.services.drain.begin()
        await asyncio.wait_for(server.task, 90)
        sock.close()
