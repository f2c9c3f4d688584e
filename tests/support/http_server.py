"""The real server on loopback in this process, and a client that speaks bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmbox.app.http.server.server import serve
from llmbox.app.http.server.sockets import listen_tcp

from .http_app import FakeServices, fake_services, make_app


@dataclass
class Running:
    port: int
    services: FakeServices
    task: asyncio.Task[None]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, data: bytes) -> bytes:
        """Everything that comes back until the server closes."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return answer

    def get(self, path: str, *headers: str) -> bytes:
        lines = [f"GET {path} HTTP/1.1", f"Host: localhost:{self.port}", *headers, "", ""]
        return "\r\n".join(lines).encode()


@contextlib.asynccontextmanager
async def running(
    handlers: Sequence[Any] = (),
    *,
    app: Any = None,
    drain_timeout: float = 60.0,
    trusted_proxies: Sequence[str] = (),
    **limits: Any,
) -> AsyncIterator[Running]:
    services = fake_services(**limits)
    sockets = listen_tcp("127.0.0.1", 0)
    port: int = sockets[0].getsockname()[1]
    server = serve(
        app or make_app(handlers, services),
        sockets,
        limits=services.settings.limits,
        drain=services.drain,
        drain_timeout=drain_timeout,
        trusted_proxies=trusted_proxies,
    )
    task = asyncio.create_task(server)
    await asyncio.sleep(0)
    try:
        yield Running(port, services, task)
    finally:
        services.drain.begin()
        services.drain.begin()
        await asyncio.wait_for(task, 90)
