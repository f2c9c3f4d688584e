"""Listening sockets: loopback twice (IPv4 and IPv6) on one port, and the unix socket.

PortInUse   another process listens there (the command line maps it to its own exit code)
"""

import contextlib
import errno
import socket
import stat
from pathlib import Path

from ...errors import LlmboxError

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted; net.core.somaxconn bounds it."""
_LOOPBACK = {"127.0.0.1": "::1", "localhost": "::1"}
_FREE_PORT_TRIES = 20


class PortInUse(LlmboxError):  # noqa: N818 - named for what the user reads
    """Another program listens on the address. `where` is `host:port` or the path of the unix socket."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} is already in use")
        self.where = where


def is_loopback(host: str) -> bool:
    return host in {"localhost", "::1"} or host.startswith("127.")


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on `host`; 127.0.0.1 brings ::1 along where the machine has IPv6.

    Port 0 takes one that is free for all of them. Raises PortInUse; OSError for addresses that are not ours.
    """
    for attempt in range(_FREE_PORT_TRIES):
        first = _listen("127.0.0.1" if host == "localhost" else host, port)
        other = _LOOPBACK.get(host)
        if other is None or not _has_ipv6_loopback():
            return [first]
        try:
            return [first, _listen(other, first.getsockname()[1])]
        except PortInUse:
            first.close()
            if port or attempt == _FREE_PORT_TRIES - 1:
                raise
    raise AssertionError("unreachable")


def listen_unix(path: Path, address: str | None = None) -> socket.socket:
    """Listen at `path`, for our own user only; a file that an earlier run left there is removed.

    `address` is a shorter way to the same file, for paths over the kernel's limit. The caller holds the
    daemon's lock: a socket file that nobody answers on is a leftover.
    """
    address = address or str(path)
    if _answers(address):
        raise PortInUse(str(path))
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(address)
        Path(address).chmod(0o600)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's delay off: else every small answer waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") from None
        raise
    sock.setblocking(False)
    return sock


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def _answers(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1)
        try:
            sock.connect(address)
        except OSError:
            return False
    return True
