"""Fault row 18: more clients than there is room for."""

import asyncio
import resource
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

from litestar import get

from llmbox.app.http.auth.guard import Access
from llmbox.app.http.server.server import serve
from llmbox.app.http.server.sockets import BACKLOG, listen_tcp
from llmbox.app.http.server.sse import EventStreamResponse
from support.engines import until
from support.http_app import fake_services
from support.http_server import running

IDLE_CLIENTS = 1000
OK = b"HTTP/1.1 200 "
SOMAXCONN = int(Path("/proc/sys/net/core/somaxconn").read_text())


async def test_a_thousand_idle_streams_leave_room_for_others() -> None:
    open_streams = 0

    @get("/idle", opt={"access": Access.READ})
    async def idle() -> EventStreamResponse:
        async def events() -> AsyncIterator[bytes]:
            nonlocal open_streams
            open_streams += 1
            try:
                yield b"data: hello\n\n"
                await asyncio.sleep(3600)
            finally:
                open_streams -= 1

        return EventStreamResponse(events())

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = min(IDLE_CLIENTS, (hard - 500) // 2)
    async with running([idle], drain_timeout=0.1) as server:  # raises the soft limit
        held = []
        for _ in range(clients):
            reader, writer = await server.connect()
            writer.write(server.get("/idle"))
            held.append((reader, writer))
        for reader, _ in held:
            await asyncio.wait_for(reader.readuntil(b"hello\n\n"), 60)
        assert open_streams == clients
        health = await server.send(server.get("/health", "Connection: close"))
        assert health.startswith(b"HTTP/1.1 200 ")
        for _, writer in held:
            writer.transport.abort()
        await until(lambda: open_streams == 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_connections_over_the_limit_are_told() -> None:
    async with running(connections=8) as server:
        held = [await server.connect() for _ in range(8)]  # accepted in the order they came
        answer = await server.send(b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in answer
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(90):
            while not (await server.send(server.get("/health", "Connection: close"))).startswith(OK):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_refused_client_that_still_sends_reads_why() -> None:
    """Closing before its bytes are read would be a reset, which takes the answer with it."""
    async with running(connections=8) as server:
        held = [await server.connect() for _ in range(8)]
        answers = []
        for _ in range(4):
            reader, writer = await server.connect()
            for _ in range(50):
                writer.write(b"x" * 20_000)
                await asyncio.sleep(0)
            answers.append(await asyncio.wait_for(reader.read(), 60))
            writer.close()
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: " in answer
        for _, writer in held:
            writer.close()


async def test_the_kernel_keeps_a_burst_of_connections() -> None:
    """asyncio would set a hundred."""
    services, sockets = fake_services(), listen_tcp("127.0.0.1", 0)
    ready = asyncio.Event()
    serving = asyncio.create_task(
        serve(None, sockets, limits=services.settings.limits, drain=services.drain, on_ready=ready.set)
    )
    await ready.wait()
    for sock in sockets:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        (backlog,) = struct.unpack_from("I", info, 28)  # tcpi_sacked, which is this of a listening socket
        assert backlog == min(BACKLOG, SOMAXCONN)
    services.drain.begin()
    await asyncio.wait_for(serving, 90)


OUT_OF_FILES = """
    import asyncio, os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    from support.http_server import running

    async def main():
        async with running() as server:
            free = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]
            clients = []
            try:
                while True:
                    clients.append(await server.connect())
            except OSError:
                pass
            await asyncio.sleep(0.2)
            for _, writer in clients:
                writer.transport.abort()
            for fd in free:
                os.close(fd)
            await asyncio.sleep(1.3)  # asyncio waits a second before it accepts again
            answer = await server.send(server.get("/health", "Connection: close"))
            print(answer.split(b"\\r\\n")[0].decode())

    asyncio.run(main())
"""


def test_a_process_without_descriptors_serves_again_when_some_are_free() -> None:
    tests = Path(__file__).parent.parent
    path = f"{tests}:{tests.parent / 'packaging' / 'tree'}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(OUT_OF_FILES)],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "HTTP/1.1 200 OK", done.stderr[-2000:]
