"""The benchmark's client against a server that sends awkward pieces."""

import asyncio

import pytest

from llmbox.app.bench.client import BenchTarget, complete

EVENTS = (
    b'data: {"choices": [{"text": "a"}], "usage": null}\n\n: ping\n\nda',
    (
        b'ta: {"choices": [{"text": "b"}], "usage": null}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7,'
        b' "prompt_tokens_details": {"cached_tokens": 2}}}\n\ndata: [DONE]\n\n'
    ),
)


async def serve(pieces, status=b"200 OK"):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, BenchTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")


async def test_tokens_and_usage_are_read_across_pieces():
    server, target = await serve(EVENTS)
    async with server:
        sample = await complete(target, [1, 2, 3], 7)
    assert sample.error == ""
    assert (sample.tokens, sample.prompt_tokens, sample.cached_tokens) == (7, 3, 2)
    assert len(sample.token_times) == 2
    assert sample.started < sample.token_times[0] < sample.token_times[1]


async def serve_chunks(pieces, end=b"0\r\n\r\n"):
    """Send pieces as chunks and keep the connection open, though the client asked for its end."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        writer.write(end)
        if end:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, BenchTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")


async def test_chunks_keep_their_times_though_they_are_read_at_the_end():
    texts = [b'data: {"choices": [{"text": "%d0"}]}\n\n' % number for number in range(4)]
    server, target = await serve_chunks([*texts, EVENTS[1][EVENTS[1].index(b"data") :]])
    async with server:
        sample = await complete(target, [1, 2, 3], 7)
    assert (sample.error, sample.tokens, len(sample.token_times)) == ("", 7, 4)
    assert sample.token_times == sorted(set(sample.token_times))
    assert sample.ended > sample.token_times[-1]


async def test_chunks_without_an_end_are_an_error():
    server, target = await serve_chunks(EVENTS, end=b"")
    async with server:
        assert "RemoteProtocolError" in (await complete(target, [1], 1)).error


@pytest.mark.parametrize(
    ("pieces", "status", "message"),
    [
        ([b'{"error": {"message": "no"}}'], b"429 Too Many Requests", "HTTP 429"),
        ([b'data: {"error": {"message": "boom"}}\n\n'], b"200 OK", "boom"),
        ([], b"200 OK", "no text"),
    ],
)
async def test_failures_are_named(pieces, status, message):
    server, target = await serve(pieces, status)
    async with server:
        assert message in (await complete(target, [1], 1)).error


async def test_nobody_listens():
    assert (await complete(BenchTarget("http://127.0.0.1:9", "m"), [1], 1)).error
