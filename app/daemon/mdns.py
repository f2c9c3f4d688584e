"""Announcement of the API by multicast DNS (RFC 6762, 6763), where the owner asked for it.

Off by default: an announcement tells everybody on the network that a model server is here.
"""

import asyncio
import ipaddress
import logging
import socket
from importlib import import_module
from typing import Any, Final

import psutil

from ..config.settings import ServerSettings
from ..http.server.sockets import BRIDGES, is_loopback
from ..lifecycle.instance import RunningDaemon

log = logging.getLogger("llmbox.daemon")

_PATIENCE: Final = 10.0
"""Seconds for the probes before an announcement, and for the farewell after it."""


def announced_addresses(host: str) -> list[str]:
    """Return the addresses that others may use for a daemon that listens on `host`."""
    if not ipaddress.ip_address(host).is_unspecified:
        return [host]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = [
        each.address.partition("%")[0]
        for name, addresses in psutil.net_if_addrs().items()
        if not name.startswith(BRIDGES)
        for each in addresses
        if each.family == family
    ]
    return [
        each
        for each in found
        if not (ipaddress.ip_address(each).is_loopback or ipaddress.ip_address(each).is_link_local)
    ]


class Announcement:
    """Service record of this daemon while it serves. Use it from the event loop; no method raises."""

    def __init__(self, server: ServerSettings, running: RunningDaemon) -> None:
        self._running = running
        self._is_wanted = server.mdns and not is_loopback(server.host)
        self._zeroconf: Any = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to announce. Does nothing unless `server.mdns` is set and others can connect."""
        if self._is_wanted and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._announce())

    async def withdraw(self) -> None:
        """Send the goodbye record (TTL 0), so that others forget the service at once."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._zeroconf is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._zeroconf.async_unregister_all_services()
                await self._zeroconf.async_close()
        except Exception as error:  # noqa: BLE001 - a third party's errors must not stop the shutdown
            log.warning("the mDNS announcement is not withdrawn: %s", str(error) or type(error).__name__)

    async def _announce(self) -> None:
        try:
            asynchronous, zeroconf = import_module("zeroconf.asyncio"), import_module("zeroconf")
        except ImportError:
            log.warning("server.mdns is set, but the package zeroconf is not installed: nothing is announced")
            return
        try:
            info = self._service(zeroconf.ServiceInfo)
            self._zeroconf = asynchronous.AsyncZeroconf(interfaces=announced_addresses(self._running.host))
            async with asyncio.timeout(_PATIENCE):
                await (await self._zeroconf.async_register_service(info, allow_name_change=True))
        except Exception as error:  # noqa: BLE001 - no network must not stop the daemon
            log.warning("nothing is announced by mDNS: %s", str(error) or type(error).__name__)
        else:
            log.info("announced by mDNS as %s", info.name)

    def _service(self, kind: Any) -> Any:
        machine = socket.gethostname().partition(".")[0]
        service = "_https._tcp.local." if self._running.certificate else "_http._tcp.local."
        return kind(
            service,
            f"llmbox on {machine}.{service}",
            port=self._running.port,
            parsed_addresses=announced_addresses(self._running.host),
            properties={"path": "/admin", "api": "/v1", "version": self._running.version},
            server=f"{machine}.local.",
        )
