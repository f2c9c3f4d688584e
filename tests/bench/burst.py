"""`make bench`: ten thousand chats at once, and how long `/health` takes meanwhile.

    python tests/bench/burst.py [--requests 10000] [--model builtin] [--write]

Starts a daemon of its own in a temporary folder on a free port. Every request opens a connection of its own;
a second process asks `/health` all the while, over a TCP connection that stays open and over new ones to
the unix socket in turn (new TCP connections are refused above `limits.connections`, as the others are).
The exit code is 1 where a request ended otherwise than in 200, or in 429 or 503 with Retry-After. `--write`
puts the table into docs/notes/overload.md.
"""

import argparse
import asyncio
import collections
import datetime as dt
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from scenarios import renew

PAUSE = 0.005
"""Seconds from one answer of `/health` to the next question."""
BEFORE = 200
"""Questions while nothing else is asked: what the machine itself adds."""
PATIENCE = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < options.requests + 100:
        sys.exit(f"{options.requests} connections need as many open files; {hard} are allowed (ulimit -Hn)")
    with tempfile.TemporaryDirectory(prefix="llmbox-burst-") as folder:
        where = ["--data-dir", folder]
        llmbox("up", "--port", "0", options.model, *where)
        try:
            told = json.loads(llmbox("status", "--json", *where))
            outcomes, delays, seconds = measure(urlsplit(told["url"]).port or 0, told["socket"], options)
        finally:
            llmbox("down", "--now", *where)
    text = table(options, outcomes, delays, seconds)
    print(text)
    if options.write:
        renew("burst", text)
    return 0 if set(outcomes) <= {"200", "429 with Retry-After", "503 with Retry-After"} else 1


def llmbox(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "llmbox", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def measure(
    port: int, path: str, options: argparse.Namespace
) -> tuple[collections.Counter[str], dict[str, Any], float]:
    """What the requests ended in, delays of `/health` by kind of connection, and how long it took."""
    context = multiprocessing.get_context("spawn")
    done, started = context.Event(), context.Event()
    receive, send = context.Pipe(duplex=False)
    prober = context.Process(target=probe, args=(port, path, started, done, send), daemon=True)
    prober.start()
    if not started.wait(60):
        sys.exit("/health did not answer")
    began = time.perf_counter()
    outcomes = asyncio.run(burst(port, options.requests, options.model))
    seconds = time.perf_counter() - began
    done.set()
    delays = receive.recv()
    prober.join()
    if isinstance(delays, str):
        sys.exit(delays)
    return outcomes, delays, seconds


async def burst(port: int, requests: int, model: str) -> collections.Counter[str]:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    ends = await asyncio.gather(*(_send(port, head.encode() + body) for _ in range(requests)))
    return collections.Counter(ends)


async def _send(port: int, request: bytes) -> str:
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            answer = await reader.read()
            writer.close()
    except (OSError, TimeoutError) as error:
        return type(error).__name__
    head, _, _ = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode() or "closed without an answer"
    return status + (" with Retry-After" if b"\r\nretry-after:" in head.lower() else "")


def probe(port: int, path: str, started: Any, done: Any, send: Any) -> None:
    try:
        send.send(asyncio.run(_probe(port, path, started, done)))
    except (OSError, TimeoutError) as error:
        send.send(repr(error))


async def _probe(port: int, path: str, started: Any, done: Any) -> dict[str, list[float]]:
    kept = await asyncio.open_connection("127.0.0.1", port)
    delays: dict[str, list[float]] = {}

    async def look(when: str) -> None:
        began = time.perf_counter()
        await _ask(f"localhost:{port}", *kept)
        delays.setdefault(f"{when}, TCP, kept open", []).append(time.perf_counter() - began)
        await asyncio.sleep(PAUSE)
        began = time.perf_counter()
        reader, writer = await asyncio.open_unix_connection(path)
        await _ask("localhost", reader, writer)
        delays.setdefault(f"{when}, unix socket, new", []).append(time.perf_counter() - began)
        writer.close()
        await asyncio.sleep(PAUSE)

    for _ in range(BEFORE):
        await look("before")
    started.set()
    while not done.is_set():
        await look("meanwhile")
    return delays


async def _ask(host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(PATIENCE):
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise OSError(f"/health: {head!r}")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))


def table(
    options: argparse.Namespace,
    outcomes: collections.Counter[str],
    delays: dict[str, list[float]],
    seconds: float,
) -> str:
    where = f"{os.cpu_count()} cores, shared with the clients; load average {os.getloadavg()[0]:.1f}"
    command = f"python tests/bench/burst.py --requests {options.requests} --model {options.model}"
    lines = [
        f"\n{where}; {dt.datetime.now(dt.UTC).date()}; `{command}`\n",
        "| what | |",
        "| --- | --- |",
        *(f"| {end} | {count} |" for end, count in sorted(outcomes.items())),
        f"| all answered after | {seconds:.1f} s |",
    ]
    for kind, values in delays.items():
        ordered = sorted(values)
        p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
        figures = f"{p50 * 1e3:.1f} / {p99 * 1e3:.1f} / {ordered[-1] * 1e3:.1f} ms of {len(ordered)}"
        lines.append(f"| `/health`, {kind}: p50 / p99 / longest | {figures} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
