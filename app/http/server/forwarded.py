"""Client address behind a reverse proxy: X-Forwarded-For, believed from trusted proxies alone."""

import ipaddress
from collections.abc import Sequence
from typing import Any

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class TrustedProxies:
    """Addresses and networks of `server.trusted_proxies`."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks: list[_Network] = [ipaddress.ip_network(text, strict=False) for text in networks]

    def __contains__(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    def find_client(self, peer: str, forwarded_for: str) -> str:
        """Return the last address that no trusted proxy has; each proxy appends the one it was called from.

        Anything that is no IP address ends the search: the proxy nearest to it is taken for the caller.
        """
        client = peer
        for entry in reversed(forwarded_for.split(",")):
            if client not in self:
                break
            try:
                client = str(ipaddress.ip_address(entry.strip()))
            except ValueError:
                break
        return client


class ForwardedClientMiddleware:
    """Put the caller's address into the ASGI scope where a trusted proxy names it."""

    def __init__(self, app: Any, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        peer = scope.get("client")
        if peer is not None and peer[0] in self._proxies:
            values = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
            client = self._proxies.find_client(peer[0], b",".join(values).decode("latin-1"))
            if client != peer[0]:
                scope = {**scope, "client": (client, 0)}
        await self._app(scope, receive, send)
