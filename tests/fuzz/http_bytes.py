"""Bytes for the HTTP protocol layer of a server that listens."""

import asyncio
import contextlib
from functools import cache
from typing import Any

from support.http_server import running

from .strategies import pieces

HTTP = pieces(
    "GET / HTTP/1.1\r\n",
    "POST /v1 HTTP/1.0\r\n",
    "Host: localhost\r\n",
    "Content-Length: ",
    "7",
    "-1",
    "\r\n",
    "Transfer-Encoding: chunked\r\n",
    "5\r\nhello\r\n",
    "0\r\n\r\n",
    "Expect: 100-continue\r\n",
    "\0",
    "Upgrade: h2c\r\nConnection: Upgrade\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "\n",
    ": ",
    "CONNECT a:1 ",
)


class _Server:
    """One server for all inputs; what its loop could not handle is kept."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.unhandled: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.unhandled.append(context))
        self._context = running()  # collected as garbage, it would end the server
        self.running = self.loop.run_until_complete(self._context.__aenter__())

    async def send(self, data: bytes) -> bytes:
        """The answer, if one came before the server saw that nobody reads on."""
        reader, writer = await self.running.connect()
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            writer.write_eof()
            return await reader.read()
        return b""


_server = cache(_Server)


def check_http(data: bytes) -> None:
    server = _server()
    answer = server.loop.run_until_complete(server.send(data))
    assert not answer or answer.startswith(b"HTTP/1.1 "), answer
    assert b"HTTP/1.1 5" not in answer, answer
    assert not server.unhandled, server.unhandled
