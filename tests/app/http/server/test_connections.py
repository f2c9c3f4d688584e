"""Limits on open connections: who gives way, who is refused."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from llmbox.app.http.server import sockets as connections
from llmbox.app.http.server.server import serve
from llmbox.app.http.server.sockets import ConnectionLimiter, listen_tcp, listen_unix
from support.clock import Clock
from support.http_app import fake_services, make_app
from support.http_server import running

OK = b"HTTP/1.1 200 "
LOCAL, FIRST, SECOND = "127.0.0.1", "192.168.1.1", "192.168.1.2"


class Connection:
    gone = False

    def give_way(self) -> None:
        self.gone = True


class Box:
    def __init__(self, limit: int = 32, per_address: int = 8) -> None:
        self.clock = Clock()
        exempt = {"10.0.0.1"}
        self.limiter = ConnectionLimiter(limit, per_address, exempt.__contains__, self.clock)

    def open(self, host: str, number: int = 1, *, busy: bool = False) -> list[Connection]:
        """Those of `number` connections that were admitted."""
        made = [connection for _ in range(number) if self.limiter.admit(connection := Connection(), host)]
        for connection in made if busy else []:
            self.limiter.mark_busy(connection)
        self.clock.now += 60
        return made


def test_the_longest_idle_connection_gives_way() -> None:
    box = Box()
    first, second = box.open(LOCAL), box.open(LOCAL)
    box.open(LOCAL, 30)
    box.limiter.mark_busy(first[0])
    box.limiter.mark_idle(first[0])  # it was used again: now the second is idle longest
    assert box.open(LOCAL)
    assert not first[0].gone
    assert second[0].gone


def test_requests_in_progress_never_give_way() -> None:
    box = Box(limit=8)
    busy = box.open(LOCAL, 8, busy=True)
    assert not box.open(LOCAL)
    box.limiter.release(busy[0])
    assert box.open(LOCAL)
    assert not any(connection.gone for connection in busy)


def test_a_young_connection_is_not_taken_for_idle() -> None:
    box = Box(limit=8)
    box.open(LOCAL, 7, busy=True)
    box.limiter.admit(young := Connection(), LOCAL)
    assert not box.open(LOCAL)
    assert not young.gone
    assert box.open(LOCAL)  # a minute later
    assert young.gone


def test_one_address_cannot_take_the_places_of_others() -> None:
    box = Box()
    held = box.open(FIRST, 8, busy=True)
    assert len(held) == 8
    assert not box.open(FIRST)
    assert box.open(SECOND)
    box.limiter.mark_idle(held[3])
    box.clock.now += 60
    assert box.open(FIRST)
    assert [connection.gone for connection in held] == [False] * 3 + [True] + [False] * 4


def test_one_ipv6_network_counts_as_one_address() -> None:
    box = Box()
    assert len([host for host in range(20) if box.open(f"2001:db8::{host:x}", busy=True)]) == 8
    assert box.open("2001:db8:0:1::1")


def test_a_trusted_proxy_speaks_for_many() -> None:
    box = Box()
    assert len(box.open("10.0.0.1", 20, busy=True)) == 20


def test_room_is_kept_for_this_machine() -> None:
    box = Box()
    taken = sum(len(box.open(f"192.168.1.{host}", 8, busy=True)) for host in range(10))
    assert taken == 24
    assert len(box.open(LOCAL, 20, busy=True)) == 8
    assert len(box.open("::1", busy=True)) == 0


def test_the_heaviest_address_gives_way_first() -> None:
    box = Box()
    light = box.open(SECOND, 4)
    heavy = box.open(LOCAL, 28)
    assert box.open(LOCAL)
    assert heavy[0].gone
    assert not any(connection.gone for connection in light)


def test_what_was_released_is_forgotten() -> None:
    box = Box()
    for _ in range(100):
        for connection in box.open(FIRST, 8):
            box.limiter.release(connection)
            box.limiter.release(connection)
    assert len(box.open(FIRST, 8, busy=True)) == 8


async def test_idle_connections_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_YOUNGEST_EVICTED", 0.0)
    async with running(connections=16) as server:
        held = [await server.connect() for _ in range(40)]
        half = await server.connect()
        half[1].write(b"GET /health HTTP/1.1\r\n")
        kept = await server.connect()  # answered once, idle since
        kept[1].write(server.get("/health"))
        await kept[0].readuntil(b'{"status":"ok"}')
        for _ in range(40):
            assert (await server.send(server.get("/health", "Connection: close"))).startswith(OK)
        told = await asyncio.wait_for(held[0][0].read(), 60)
        assert told.startswith(b"HTTP/1.1 503 "), "its first request may be on its way"
        held += [await server.connect() for _ in range(40)]
        answer = await asyncio.wait_for(half[0].read(), 60)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 5\r\n" in answer
        assert await asyncio.wait_for(kept[0].read(), 60) == b""
        for _, writer in [*held, half, kept]:
            writer.close()


async def test_the_unix_socket_needs_no_place() -> None:
    services = fake_services(connections=8)
    with tempfile.TemporaryDirectory() as folder:
        sockets = [*listen_tcp("127.0.0.1", 0), listen_unix(Path(f"{folder}/s"))]
        port = sockets[0].getsockname()[1]
        app = make_app([], services)
        task = asyncio.create_task(serve(app, sockets, limits=services.settings.limits, drain=services.drain))
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert b"too_many_connections" in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        for _ in range(20):
            reader, writer = await asyncio.open_unix_connection(f"{folder}/s")
            held.append((reader, writer))
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), 60)).startswith(OK)
        for _, writer in held:
            writer.close()
        services.drain.begin()
        await asyncio.wait_for(task, 90)
