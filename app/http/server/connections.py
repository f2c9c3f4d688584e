"""Limits on open connections: in all, for each remote address, and room kept for this machine.

At a limit the connection that has been idle longest gives way, as in nginx: a client that opens connections
and sends nothing cannot lock out others. Connections with a request in progress are never closed for one.
Peers of the unix socket belong to the daemon's own user and are not counted.
"""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

_YOUNGEST_EVICTED = 2.0
"""Least idle seconds before eviction. The request of a younger connection may be on its way."""
_LOCAL = "this machine"


class Evictable(Protocol):
    def give_way(self) -> None:
        """Close this idle connection, as its place is needed."""


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
        self._open: dict[Evictable, str] = {}
        self._counts: dict[str, int] = {}
        self._idle: dict[str, OrderedDict[Evictable, float]] = {}
        """Idle connections by address, the longest idle first, with the time since when."""

    def admit(self, connection: Evictable, host: str) -> bool:
        """Count a new, idle connection. False when it must be refused; it is not counted then."""
        group = _group(host)
        if not self._make_room(group, host):
            return False
        self._open[connection] = group
        self._counts[group] = self._counts.get(group, 0) + 1
        self.mark_idle(connection)
        return True

    def release(self, connection: Evictable) -> None:
        """Forget a connection that ended. One that was refused is no error."""
        self.mark_busy(connection)
        group = self._open.pop(connection, None)
        if group is not None:
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group]

    def mark_idle(self, connection: Evictable) -> None:
        """Note that no request of this connection is in progress."""
        group = self._open.get(connection)
        if group is not None:
            self._idle.setdefault(group, OrderedDict()).setdefault(connection, self._clock())

    def mark_busy(self, connection: Evictable) -> None:
        """Note that a request came in whole, headers at least."""
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


@lru_cache(maxsize=4096)
def _group(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_loopback:
        return _LOCAL
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))
