import asyncio
import socket
import stat
from pathlib import Path

import pytest

from llmbox.app.http.server import sockets as server_sockets
from llmbox.app.http.server.sockets import PortInUse, is_loopback, listen_tcp, listen_unix
from llmbox.engine.hardware.machine import Memory


def close(*sockets: socket.socket) -> None:
    for sock in sockets:
        sock.close()


def test_loopback_is_bound_twice_on_one_port() -> None:
    sockets = listen_tcp("127.0.0.1", 0)
    try:
        ports = {sock.getsockname()[1] for sock in sockets}
        assert len(ports) == 1
        assert sockets[0].getsockname()[0] == "127.0.0.1"
        assert [sock.getsockname()[0] for sock in sockets[1:]] in ([], ["::1"])
    finally:
        close(*sockets)


def test_a_port_in_use_is_named() -> None:
    sockets = listen_tcp("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    try:
        with pytest.raises(PortInUse) as caught:
            listen_tcp("127.0.0.1", port)
        assert caught.value.where == f"127.0.0.1:{port}"
    finally:
        close(*sockets)


def test_the_unix_socket_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sock = listen_unix(path)
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(PortInUse):
            listen_unix(path)
    finally:
        close(sock)


def test_a_leftover_unix_socket_is_replaced_but_not_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listen_unix(path).close()
    listen_unix(path).close()
    other = tmp_path / "file"
    other.write_text("keep")
    with pytest.raises(OSError):
        listen_unix(other)
    assert other.read_text() == "keep"


def test_is_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.2", "localhost.lan"))


async def test_memory_is_returned_once_for_several_bodies(monkeypatch):
    done = []
    monkeypatch.setattr(server_sockets, "_TRIM_SECONDS", 0)
    monkeypatch.setattr(server_sockets, "trim_heap", lambda: done.append(None))
    bodies, loop = server_sockets.BodyMemory(1 << 30), asyncio.get_running_loop()
    for _ in range(2):
        bodies.add("a", server_sockets.LARGE_BODY, server_sockets.LARGE_BODY)
        bodies.release("a", server_sockets.LARGE_BODY)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await loop.shutdown_default_executor()
    assert done == [None]


def test_an_address_with_less_than_its_share_has_room_for_a_body():
    bodies = server_sockets.BodyMemory(100)
    assert bodies.add("greedy", 100, 100)
    assert not bodies.add("greedy", 1, 1)
    assert bodies.add("other", 50, 50)
    assert not bodies.add("other", 1, 1)
    bodies.release("greedy", 101)
    assert bodies.add("other", 49, 49)
    bodies.release("other", 100)
    assert not bodies._held


def test_the_last_eighth_is_for_small_bodies():
    small, large = server_sockets.SMALL_BODY, server_sockets.SMALL_BODY + 1
    bodies = server_sockets.BodyMemory(80 * large)
    assert bodies.add("a", 70 * large, 70 * large)
    assert not bodies.add("a", large, large)
    assert bodies.add("a", 9 * small, small)
    assert not bodies.add("a", small, small)


@pytest.mark.parametrize(
    ("memory", "limit"), [(64 << 20, 1 << 20), (12_800_000_000, 100_000_000), (1 << 40, 1_000_000_000)]
)
def test_bodies_may_have_a_part_of_the_memory(memory: int, limit: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_sockets, "read_memory", lambda: Memory(memory, memory, limited_by_cgroup=True))
    bodies = server_sockets.BodyMemory()
    assert bodies.add("a", limit, 1)
    assert not bodies.add("a", 1, 1)
