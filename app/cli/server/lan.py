"""Addresses of this machine on its networks, for `llmbox share`."""

import ipaddress
import socket
from dataclasses import dataclass

from ...http.server.sockets import BRIDGES


@dataclass(frozen=True, slots=True)
class NetworkAddress:
    address: str
    interface: str


def lan_addresses() -> list[NetworkAddress]:
    """Return the IPv4 addresses by which other devices may reach this machine, the likeliest first."""
    import psutil

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
