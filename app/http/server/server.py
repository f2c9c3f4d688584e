"""Server: serves the application on several listening sockets, on the event loop of the engine clients.

It uses uvicorn's protocol without its `Server`, which wakes ten times a second: an idle machine stays silent.
"""

import asyncio
import ipaddress
import resource
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from ...config.settings import LimitSettings
from ...lifecycle.drain import Drain
from .protocol import DatedState, LimitedProtocol
from .sockets import BACKLOG, ConnectionLimiter

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

        The first value that is not an IP address ends the search: the proxy before it counts as the caller.
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


_LAST_WORDS = 0.5
"""Seconds for writing error objects after the drain has expired."""
_ACCEPTS = 16
"""Connections accepted in one turn of the loop: a burst of thousands must not hold up other connections."""
_LINGERING = 8192
"""Refused connections that may stay open for a moment so that their clients read the reason."""
_RESERVED_FILES = 128
"""File descriptors reserved for the unix socket, engines, the database and log files."""


async def serve(
    app: Any,
    sockets: Sequence[socket.socket],
    *,
    limits: LimitSettings,
    drain: Drain,
    drain_timeout: float = 30.0,
    tls: ssl.SSLContext | None = None,
    trusted_proxies: Sequence[str] = (),
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve until `drain.begin()` was called and all open requests ended, at most `drain_timeout` seconds.

    The sockets are closed at the end. While draining they still accept, so that clients get 503 and
    `/ready` can be asked; every answer then closes its connection. A second `drain.begin()` ends at once.
    With `tls` TCP sockets speak HTTPS; the unix socket never does.
    """
    state, listeners = await _listen(app, sockets, limits, tls, trusted_proxies)
    loop = asyncio.get_running_loop()
    try:
        if on_ready:
            on_ready()
        await drain.begun.wait()
        _close_idle(state)
        deadline = loop.time() + drain_timeout
        await _wait_for_tasks(state, drain, deadline)
        await _wait_for_writes(state, drain, deadline)
    finally:
        for listener in listeners:
            listener.close()
        await _end_all(state, drain)


async def _listen(
    app: Any,
    sockets: Sequence[socket.socket],
    limits: LimitSettings,
    tls: ssl.SSLContext | None,
    trusted_proxies: Sequence[str],
) -> tuple[DatedState, list[asyncio.Server]]:
    """Accept connections on the sockets, within the limits. Returns the state that they share, and the
    listeners.
    """
    proxies = TrustedProxies(trusted_proxies)
    connections, lingering = _connection_limits(limits.connections)
    per_address = min(limits.connections_per_address or max(8, connections // 4), connections)
    limiter = ConnectionLimiter(connections, per_address, proxies.__contains__)
    config = Config(
        ForwardedClientMiddleware(app, proxies) if trusted_proxies else app,
        interface="asgi3",
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        proxy_headers=False,  # uvicorn would believe X-Forwarded-For of every local process
        timeout_keep_alive=int(limits.idle_timeout),
    )
    config.load()
    state, listeners = DatedState(lingering), []
    for sock in sockets:
        context = None if sock.family == socket.AF_UNIX else tls
        server = await asyncio.get_running_loop().create_server(
            partial(LimitedProtocol, config, state, limits, limiter),
            sock=sock,
            backlog=_ACCEPTS,
            ssl=context,
            ssl_handshake_timeout=limits.header_timeout if context else None,
        )
        sock.listen(BACKLOG)  # the kernel's queue and the accepts of one turn: one number for asyncio
        listeners.append(server)
    return state, listeners


def _close_idle(state: ServerState) -> None:
    for connection in list(state.connections):
        connection.shutdown()


async def _wait_for_tasks(state: ServerState, drain: Drain, deadline: float) -> None:
    loop = asyncio.get_running_loop()
    hurry = loop.create_task(drain.hurried.wait())
    try:
        while state.tasks and not hurry.done() and loop.time() < deadline:
            await asyncio.wait(
                {*state.tasks, hurry},
                timeout=deadline - loop.time(),
                return_when=asyncio.FIRST_COMPLETED,
            )
    finally:
        hurry.cancel()


async def _wait_for_writes(state: ServerState, drain: Drain, deadline: float) -> None:
    """Wait until slow clients have read the ends of their complete answers."""
    loop = asyncio.get_running_loop()
    while any(connection.transport.get_write_buffer_size() for connection in state.connections):
        if drain.hurried.is_set() or loop.time() >= deadline:
            return
        await asyncio.sleep(0.02)


async def _end_all(state: ServerState, drain: Drain) -> None:
    """Cancel all requests, which see `drain.expired` and end with an error object; then close every
    connection.
    """
    drain.expired = True
    tasks = set(state.tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_LAST_WORDS)
    for connection in list(state.connections):
        connection.transport.close()
    await asyncio.sleep(0)
    for connection in list(state.connections):
        connection.transport.abort()


def _connection_limits(wanted: int) -> tuple[int, int]:
    """Return the maximum numbers of open connections, and of refused ones that wait for their clients to
    close. Raises the soft limit of open files as far as permitted, and reserves some files for other uses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _LINGERING + _RESERVED_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    files = soft - _RESERVED_FILES
    connections = max(8, min(wanted, files * 3 // 4))
    return connections, max(0, min(_LINGERING, files - connections))
