"""Fault row 18: clients that send too slowly, too much, or do not read."""

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
from litestar import get, post
from litestar.params import JSONBody

from llmbox.app.http.auth.guard import Access
from llmbox.app.http.server.sse import EventStreamResponse
from support.http_server import Running, running


class Body(msgspec.Struct):
    text: str


@post("/echo", status_code=200, opt={"access": Access.INFER})
async def echo(data: JSONBody[Body]) -> str:
    return data.text


def post_head(server: Running, length: int) -> bytes:
    return (
        f"POST /echo HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


async def test_slowloris_ends_in_408_and_others_are_served() -> None:
    async with running(header_timeout=1.5) as server:
        held = [await server.connect() for _ in range(50)]
        for _, writer in held:
            writer.write(b"GET /health HTTP/1.1\r\n")
        for _ in range(3):  # a byte now and then buys no time
            await asyncio.sleep(0.02)
            for _, writer in held:
                writer.write(b"X")
        health = await server.send(server.get("/health", "Connection: close"))
        assert health.startswith(b"HTTP/1.1 200 ")
        for reader, writer in held:
            answer = await asyncio.wait_for(reader.read(), 90)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"request_timeout"' in answer
            writer.close()


async def test_a_silent_connection_is_closed() -> None:
    async with running(header_timeout=0.1) as server:
        assert (await server.send(b"")).startswith(b"HTTP/1.1 408 ")


async def test_a_slow_second_request_is_closed_too() -> None:
    async with running(header_timeout=1.0) as server:
        reader, writer = await server.connect()
        writer.write(server.get("/health") + b"GET /hea")
        await reader.readuntil(b'{"status":"ok"}')
        assert (await asyncio.wait_for(reader.read(), 90)).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_slow_body_ends_in_408() -> None:
    async with running([echo], body_timeout=0.1) as server:
        answer = await server.send(post_head(server, 100) + b'{"text":')
        assert answer.startswith(b"HTTP/1.1 408 ")


async def test_time_outs_leave_a_long_answer_alone() -> None:
    @get("/slow", opt={"access": Access.INFER})
    async def slow() -> str:
        await asyncio.sleep(1.0)
        return "in the end"

    async with running([slow, echo], header_timeout=0.5, body_timeout=0.5) as server:
        reader, writer = await server.connect()
        for _ in range(2):
            writer.write(server.get("/slow"))
            await asyncio.wait_for(reader.readuntil(b"in the end"), 90)
        writer.close()


@pytest.mark.parametrize(
    "line", [b"X-Long: " + b"a" * 3000, b"X-" + b"a" * 3000, b"X-" + b"a" * 3000 + b": 1"]
)
@pytest.mark.parametrize("ending", [b"\r\n\r\n", b""])
async def test_a_long_header_line_is_431(line: bytes, ending: bytes) -> None:
    async with running(header_line_bytes=2000) as server:
        answer = await server.send(server.get("/health")[:-2] + line + ending)
        refusal = b"431" if b":" in line or not ending else b"400"  # a finished line without a colon
        assert answer.startswith(b"HTTP/1.1 %b " % refusal)


async def test_a_line_that_comes_in_pieces_is_431() -> None:
    async with running(header_line_bytes=2000) as server:
        reader, writer = await server.connect()
        writer.write(server.get("/health")[:-2] + b"X-Long: ")
        for _ in range(2):
            await asyncio.sleep(0.02)
            writer.write(b"a" * 1500)
        assert (await asyncio.wait_for(reader.read(), 90)).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_a_long_request_line_is_431() -> None:
    async with running(header_line_bytes=2000) as server:
        assert (await server.send(server.get("/" + "a" * 3000))).startswith(b"HTTP/1.1 431 ")


async def test_too_many_headers_are_431() -> None:
    async with running(header_count=20) as server:
        fits = server.get("/health", *(f"X-{n}: 1" for n in range(18)), "Connection: close")
        assert (await server.send(fits)).startswith(b"HTTP/1.1 200 ")
        over = server.get("/health", *(f"X-{n}: 1" for n in range(30)))
        assert (await server.send(over)).startswith(b"HTTP/1.1 431 ")


async def test_a_reader_without_progress_is_cut_off_and_bounded() -> None:
    made, closed = 0, asyncio.Event()

    @get("/flood", opt={"access": Access.INFER})
    async def flood() -> EventStreamResponse:
        async def events() -> AsyncIterator[bytes]:
            nonlocal made
            try:
                while True:
                    made += 10_000
                    yield b"x" * 10_000
                    await asyncio.sleep(0)
            finally:
                closed.set()

        return EventStreamResponse(events())

    async with running([flood], stream_timeout=0.3, stream_buffer_bytes=100_000) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(server.get("/flood"))
        await asyncio.wait_for(closed.wait(), 90)
        # What the kernel takes for a socket (some megabytes on loopback), and our bound behind it.
        assert made < 20_000_000
        sock.close()
        health = await server.send(server.get("/health", "Connection: close"))
        assert health.startswith(b"HTTP/1.1 200 ")


def chunked_head(server: Running, *headers: str) -> bytes:
    lines = [
        "POST /echo HTTP/1.1",
        f"Host: localhost:{server.port}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode()


@pytest.mark.parametrize("ending", [b"", b"\r\n \r\n1;"])
async def test_chunk_extensions_are_counted(ending: bytes) -> None:
    """The parser throws them away: a body of no bytes could go on for ever."""
    async with running([echo]) as server:
        reader, writer = await server.connect()
        writer.write(chunked_head(server) + b"1;")
        for _ in range(40):
            writer.write(b"x" * 8192 + ending)
        answer = await asyncio.wait_for(reader.read(), 90)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"code":"body_too_large"' in answer
        writer.close()


@pytest.mark.parametrize("extension", [b"", b";a=b", b';name="value"'])
async def test_a_body_in_the_smallest_chunks_is_taken(extension: bytes) -> None:
    body = b'{"text": "' + b"x" * 5000 + b'"}'
    chunks = b"".join(b"1%b\r\n%c\r\n" % (extension, byte) for byte in body) + b"0\r\n\r\n"
    async with running([echo]) as server:
        answer = await server.send(chunked_head(server, "Connection: close") + chunks)
        assert answer.startswith(b"HTTP/1.1 200 ")
