# ruff: noqa: RUF001 - en dashes in ranges
"""Which ASGI server carries the event streams: measured, for docs/notes/asgi-servers.md.

    python -P tests/bench/asgi_servers.py [--rounds 5] [--streams 64] [--events 400] [--only NAME,NAME]

One process serves a bare ASGI application, another one is the client. Rounds are interleaved over the
servers, so that a noisy neighbor hits all of them; every figure is given with its spread, and speed also as
CPU time of the server, which the neighbors move less.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"builtin","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
)
BASE = "uvicorn-httptools-asyncio"
LIMIT = 2.0
"""Seconds given to every time-out that a server lets us set."""
PATIENCE = 6.0
"""Seconds after which a time-out counts as absent."""


# --------------------------------------------------------------------------- the served application


class Bare:
    """/stream/N: N events, a loop turn after each. /hang: until the client leaves. Else: what it saw."""

    def __init__(self) -> None:
        self.left_at = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["path"].startswith("/stream/"):
            await self._stream(int(scope["path"][8:]), send)
        elif scope["path"] == "/hang":
            await self._hang(receive, send)
        else:
            while (await receive()).get("more_body"):
                pass
            loop = id(asyncio.get_running_loop())
            await self._answer(send, {"left_at": self.left_at, "pid": os.getpid(), "loop": loop})

    async def _lifespan(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _stream(self, count: int, send: Any) -> None:
        await self._start(send, b"text/event-stream")
        for _ in range(count):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _hang(self, receive: Any, send: Any) -> None:
        await self._start(send, b"text/event-stream")
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left_at = time.monotonic()

    async def _start(self, send: Any, kind: bytes) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})

    async def _answer(self, send: Any, value: Any) -> None:
        await self._start(send, b"application/json")
        await send({"type": "http.response.body", "body": json.dumps(value).encode()})


# --------------------------------------------------------------------------- the servers


@dataclass(frozen=True)
class Address:
    port: int
    unix: str


def bind(address: Address) -> list[socket.socket]:
    from llmbox.app.http.server.sockets import listen_tcp, listen_unix

    return [*listen_tcp("127.0.0.1", address.port), listen_unix(Path(address.unix))]


async def serve_uvicorn(address: Address, http: str) -> None:
    import uvicorn

    config = uvicorn.Config(
        Bare(), http=http, ws="none", log_level="critical", access_log=False, timeout_keep_alive=75
    )
    await uvicorn.Server(config).serve(bind(address))


async def serve_hypercorn(address: Address, _: str) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    port = address.port
    config.bind = [f"127.0.0.1:{port}", f"[::1]:{port}", f"unix:{address.unix}"]
    config.keep_alive_timeout, config.read_timeout = 75, int(LIMIT)
    config.errorlog = None
    await serve(Bare(), config, shutdown_trigger=asyncio.Event().wait)


async def serve_granian(address: Address, _: str) -> None:
    """Its embedded server takes one address: three of them on one loop."""
    from granian.http import HTTP1Settings
    from granian.server.embed import Server

    app = Bare()
    settings = HTTP1Settings(header_read_timeout=int(LIMIT * 1000))
    common: dict[str, Any] = {"interface": "asginl", "http1_settings": settings, "log_enabled": False}
    servers = [
        Server(app, "127.0.0.1", address.port, **common),
        Server(app, "::1", address.port, **common),
        Server(app, uds=Path(address.unix), **common),
    ]
    await asyncio.gather(*(server.serve() for server in servers))


async def serve_llmbox(address: Address, _: str) -> None:
    from llmbox.app.config.settings import LimitSettings
    from llmbox.app.http.server.server import serve
    from llmbox.app.lifecycle.drain import Drain

    limits = replace(LimitSettings(), header_timeout=LIMIT, body_timeout=LIMIT)
    await serve(Bare(), bind(address), limits=limits, drain=Drain())


SERVERS: dict[str, tuple[Any, str, str]] = {
    "uvicorn-httptools-asyncio": (serve_uvicorn, "httptools", "asyncio"),
    "uvicorn-httptools-uvloop": (serve_uvicorn, "httptools", "uvloop"),
    "uvicorn-h11-asyncio": (serve_uvicorn, "h11", "asyncio"),
    "uvicorn-h11-uvloop": (serve_uvicorn, "h11", "uvloop"),
    "hypercorn-asyncio": (serve_hypercorn, "", "asyncio"),
    "hypercorn-uvloop": (serve_hypercorn, "", "uvloop"),
    "granian-asyncio": (serve_granian, "", "asyncio"),
    "granian-uvloop": (serve_granian, "", "uvloop"),
    "llmbox-asyncio": (serve_llmbox, "", "asyncio"),
    "llmbox-uvloop": (serve_llmbox, "", "uvloop"),
}


def run_server(name: str, address: Address) -> None:
    serve, option, loop = SERVERS[name]
    factory: Any = asyncio.new_event_loop
    if loop == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(address, option))


# --------------------------------------------------------------------------- the client


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def exchange(sock: socket.socket, path: str = "/") -> Any:
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    data = b""
    while chunk := sock.recv(65536):
        data += chunk
    return json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])


def read_streams(port: int, streams: int, events: int) -> float:
    """Seconds until all streams were read to their end."""
    selector = selectors.DefaultSelector()
    tails: dict[Any, bytes] = {}
    for _ in range(streams):
        sock = connect(port)
        sock.setblocking(False)
        tails[sock] = b""
        selector.register(sock, selectors.EVENT_READ)
    began = time.perf_counter()
    for sock in tails:
        sock.sendall(f"GET /stream/{events} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    while tails:
        for item, _ in selector.select(30):
            ready: Any = item.fileobj
            tails[ready] = (tails[ready] + ready.recv(1 << 18))[-64:]
            if b"[DONE]" in tails[ready]:
                selector.unregister(ready)
                ready.close()
                del tails[ready]
    return time.perf_counter() - began


def time_out_of(port: int, sent: bytes) -> str:
    """What happens to a client that stops in the middle."""
    with connect(port) as sock:
        sock.sendall(sent)
        sock.settimeout(PATIENCE)
        began = time.perf_counter()
        try:
            answer = sock.recv(4096)
        except TimeoutError:
            return f"none in {PATIENCE:.0f} s"
        except ConnectionError:
            answer = b""
        status = answer.split(b" ")[1].decode() if answer else "closed"
        return f"{status} after {time.perf_counter() - began:.1f} s"


def long_header(port: int, size: int) -> str:
    with connect(port) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * size + b"\r\n\r\n")
        return sock.recv(4096).split(b" ")[1].decode()
    return "reset"


def disconnect_delay(port: int) -> float:
    """Seconds from the client's close until the application was told."""
    sock = connect(port)
    sock.sendall(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
    sock.recv(4096)
    closed_at = time.monotonic()
    sock.close()
    for _ in range(100):
        time.sleep(0.02)
        seen: float = exchange(connect(port))["left_at"]
        if seen >= closed_at:
            return seen - closed_at
    return float("inf")


def sockets_share_a_loop(address: Address) -> str:
    found = []
    for family, target in (
        (socket.AF_INET, ("127.0.0.1", address.port)),
        (socket.AF_INET6, ("::1", address.port)),
        (socket.AF_UNIX, address.unix),
    ):
        with socket.socket(family) as sock:
            sock.settimeout(5)
            sock.connect(target)
            answer = exchange(sock)
            found.append((answer["pid"], answer["loop"]))
    return "yes" if len(set(found)) == 1 else f"no: {len(set(found))} loops"


# --------------------------------------------------------------------------- rounds and tables


@dataclass
class Figures:
    events_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def running(name: str) -> Iterator[tuple[Address, int]]:
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = Address(probe.getsockname()[1], f"{folder}/s")
        command = [sys.executable, "-P", __file__, "--serve", name, str(address.port), address.unix]
        process = subprocess.Popen(command)
        try:
            wait_until_up(address)
            yield address, process.pid
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def wait_until_up(address: Address) -> None:
    for _ in range(200):
        time.sleep(0.05)
        with contextlib.suppress(OSError, ValueError):
            exchange(connect(address.port))
            return
    raise SystemExit("the server did not start")


def measure(name: str, figures: Figures, streams: int, events: int) -> None:
    with running(name) as (address, pid):
        read_streams(address.port, streams, 20)
        before = psutil.Process(pid).cpu_times()
        seconds = read_streams(address.port, streams, events)
        after = psutil.Process(pid).cpu_times()
        total = streams * events
        cpu = after.user + after.system - before.user - before.system
        figures.events_s.append(total / seconds)
        figures.cpu_us.append(cpu / total * 1e6)
        figures.delays += [disconnect_delay(address.port) for _ in range(3)]


def probe_limits(name: str, figures: Figures) -> None:
    head = (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"
    )
    with running(name) as (address, _):
        figures.facts = {
            "silent client": time_out_of(address.port, b""),
            "half a header": time_out_of(address.port, b"GET / HTTP/1.1\r\nHost: local"),
            "half a body": time_out_of(address.port, head + b"{"),
            "100 kB header line": long_header(address.port, 100_000),
            "three sockets, one loop": sockets_share_a_loop(address),
        }


def spread(values: list[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def table(results: dict[str, Figures]) -> str:
    base = results.get(BASE) or next(iter(results.values()))
    lines = [
        "| server | events/s | ratio | server CPU µs/event | application told of disconnect, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, got in results.items():
        ratios = [mine / theirs for mine, theirs in zip(got.events_s, base.events_s, strict=True)]
        delays = spread([delay * 1000 for delay in got.delays], 1)
        lines.append(
            f"| {name} | {spread(got.events_s)} | {spread(ratios, 2)} | {spread(got.cpu_us, 1)} | {delays} |"
        )
    names = list(next(iter(results.values())).facts)
    lines += ["", "| server | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    lines += [f"| {name} | " + " | ".join(got.facts.values()) + " |" for name, got in results.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", nargs=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=400)
    parser.add_argument("--only", default=",".join(SERVERS))
    options = parser.parse_args()
    if options.serve:
        name, port, unix = options.serve
        run_server(name, Address(int(port), unix))
        return
    results = {name: Figures() for name in options.only.split(",")}
    for _ in range(options.rounds):
        for name, figures in results.items():
            measure(name, figures, options.streams, options.events)
    for name, figures in results.items():
        probe_limits(name, figures)
    packages = ("uvicorn", "httptools", "h11", "uvloop", "hypercorn", "granian")
    print(platform.platform(), f"Python {platform.python_version()}", f"{os.cpu_count()} cores")
    print(", ".join(f"{package} {version(package)}" for package in packages))
    print(f"{options.rounds} rounds, {options.streams} streams, {options.events} events each\n")
    print(table(results))


if __name__ == "__main__":
    main()
