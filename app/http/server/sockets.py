"""Listening sockets: loopback twice (IPv4 and IPv6) on one port, the unix socket; addresses of this machine.

PortInUse   another process listens there (the command line maps it to its own exit code)
"""

import asyncio
import contextlib
import errno
import ipaddress
import socket
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmbox.engine.hardware.machine import read_memory
from llmbox.engine.hardware.proc import trim_heap

from ...errors import LlmboxError

if TYPE_CHECKING:
    from .protocol import LimitedProtocol

BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted; net.core.somaxconn bounds it."""
_LOOPBACK = {"127.0.0.1": "::1", "localhost": "::1"}
_FREE_PORT_TRIES = 20
BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "podman", "lxc")
"""First letters of interfaces of containers and virtual machines: no other device reaches their addresses."""


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


_YOUNGEST_EVICTED = 2.0
"""Minimum idle seconds before eviction. The request of a younger connection may be on its way."""
_LOCAL = "this machine"


class ConnectionLimiter:
    """Count connections by address and choose which idle one to close for a new one.

    `limit` bounds all TCP connections; a sixteenth of it (8 at least) is for this machine alone.
    `per_address` bounds one remote address (IPv6: one /64). Loopback and trusted proxies have only the
    overall bound.
    """

    def __init__(
        self,
        limit: int,
        per_address: int,
        is_exempt: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._remote_limit = limit - max(min(8, limit // 2), limit // 16)
        self._per_address = per_address
        self._is_exempt = is_exempt
        self._clock = clock
        self._open: dict[LimitedProtocol, str] = {}
        self._counts: dict[str, int] = {}
        self._idle: dict[str, OrderedDict[LimitedProtocol, float]] = {}
        """Idle connections by address, the longest idle first, with the time since when."""

    def admit(self, connection: "LimitedProtocol", host: str) -> bool:
        """Count a new, idle connection. False when it must be refused; it is not counted then."""
        group = address_group(host)
        if not self._make_room(group, host):
            return False
        self._open[connection] = group
        self._counts[group] = self._counts.get(group, 0) + 1
        self.mark_idle(connection)
        return True

    def release(self, connection: "LimitedProtocol") -> None:
        """Forget a connection that ended. A refused one is not an error."""
        self.mark_busy(connection)
        group = self._open.pop(connection, None)
        if group is not None:
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group]

    def mark_idle(self, connection: "LimitedProtocol") -> None:
        """Note that no request of this connection is in progress."""
        group = self._open.get(connection)
        if group is not None:
            self._idle.setdefault(group, OrderedDict()).setdefault(connection, self._clock())

    def mark_busy(self, connection: "LimitedProtocol") -> None:
        """Record that a request has arrived, at least its headers."""
        group = self._open.get(connection, "")
        idle = self._idle.get(group)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[group]

    def _make_room(self, group: str, host: str) -> bool:
        remote = group != _LOCAL
        if (
            remote
            and self._counts.get(group, 0) >= self._per_address
            and not self._is_exempt(host)
            and not self._evict(group)
        ):
            return False
        if remote and len(self._open) - self._counts.get(_LOCAL, 0) >= self._remote_limit:
            return self._evict(*self._heaviest(remote_only=True))
        return len(self._open) < self._limit or self._evict(*self._heaviest())

    def _heaviest(self, *, remote_only: bool = False) -> list[str]:
        groups = [group for group in self._idle if not (remote_only and group == _LOCAL)]
        return sorted(groups, key=lambda group: self._counts[group], reverse=True)

    def _evict(self, *groups: str) -> bool:
        """Close the longest idle connection of the first of `groups` that has one idle long enough."""
        for group in groups:
            idle = self._idle.get(group)
            if not idle:
                continue
            connection, since = next(iter(idle.items()))
            if self._clock() - since >= _YOUNGEST_EVICTED:
                self.release(connection)
                connection.give_way()
                return True
        return False


LARGE_BODY: Final = 1 << 20
"""Bytes of a body after which freed memory goes back."""
SMALL_BODY: Final = 1 << 16
"""Bytes of a body that the last eighth of the limit is kept for."""
_MEMORY_PER_BODY: Final = 128
"""Memory for each byte of open bodies. A text with an emoji has 4 bytes a character in its values and in the
prompt, and its tokens take more: 50 bytes for each of the body were measured. Models may have 80 % of the
memory.
"""
_TRIM_SECONDS: Final = 1.0
"""Time between returns of memory, each of which takes some milliseconds."""


class BodyMemory:
    """Memory of request bodies: counts those of open requests by address, and returns freed memory to the
    system after large ones. Their text, values and tokens take many times their size in the arenas of the
    threads that read them, and glibc would keep it.
    """

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: bytes of all bodies; None: what the memory, or a cgroup's limit of it, has room for."""
        if limit is None:
            limit = max(1 << 20, min(1_000_000_000, read_memory().total // _MEMORY_PER_BODY))
        self._limit = limit
        self._held: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def largest(self) -> int:
        """Size of the largest body that may be accepted."""
        return self._limit - self._limit // 8

    def add(self, host: str, size: int, body: int) -> bool:
        """Count `size` received bytes of a body of `body` so far. False where it must be refused: the limit
        is reached, and the address has its share of it.
        """
        self._held[host] += size
        limit = self._limit if body <= SMALL_BODY else self.largest
        return self._held.total() <= limit or self._held[host] * len(self._held) <= limit

    def release(self, host: str, size: int) -> None:
        """Forget the body of a request that ended."""
        self._held[host] -= size
        if not self._held[host]:
            del self._held[host]
        if size >= LARGE_BODY and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, trim_heap)


@lru_cache(maxsize=4096)
def address_group(host: str) -> str:
    """Return the name under which connections of a host are counted: its network for IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_loopback:
        return _LOCAL
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


@dataclass(frozen=True, slots=True)
class NetworkAddress:
    address: str
    interface: str


def lan_addresses() -> list[NetworkAddress]:
    """Return the IPv4 addresses by which other devices may reach this machine, the likeliest first."""
    import psutil  # noqa: PLC0415 - 30 ms that the daemon's start need not wait for

    up = {name for name, each in psutil.net_if_stats().items() if each.isup}
    found = [
        NetworkAddress(each.address, name)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and not name.startswith(BRIDGES)
        for each in addresses
        if each.family == socket.AF_INET and _is_for_others(each.address)
    ]
    first = _address_of_default_route()
    return sorted(found, key=lambda each: each.address != first)


def _is_for_others(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def _address_of_default_route() -> str:
    """Return this machine's address towards the network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
        return address
