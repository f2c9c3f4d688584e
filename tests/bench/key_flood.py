"""`make bench`: time to first token of one key while another key floods the model.

    python tests/bench/key_flood.py [--flood 200] [--probes 20] [--model builtin] [--write]

Starts a daemon of its own in a temporary folder on a free port. One key keeps so many requests open. Now
short requests come, one after another: with the flood's own key, which waits behind the flood as everybody
would in one queue for all, with another key of the same class, and with a premium key. `--write` puts the
table into docs/notes/overload.md.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from scenarios import renew

PATIENCE = 300.0
ANSWER = 200
"""Tokens of the flood's answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flood", type=int, default=200)
    parser.add_argument("--probes", type=int, default=20)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmbox-flood-") as folder:
        where = ["--data-dir", folder]
        keys = {name: make_key(name, priority, where) for name, priority in PRIORITIES.items()}
        llmbox("up", "--port", "0", options.model, *where)
        try:
            told = json.loads(llmbox("status", "--json", *where))
            delays = asyncio.run(measure(urlsplit(told["url"]).port or 0, keys, options))
        finally:
            llmbox("down", "--now", *where)
    text = table(options, delays)
    print(text)
    if options.write:
        renew("key_flood", text)


PRIORITIES = {"flood": 0, "quiet": 0, "premium": -5}


def llmbox(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "llmbox", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_key(name: str, priority: int, where: list[str]) -> str:
    told = json.loads(llmbox("key", "add", name, "--priority", str(priority), "--json", *where))
    return str(told["secret"])


async def measure(port: int, keys: dict[str, str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds to the first token, by who asks and when."""

    async def probes(name: str, number: int) -> list[float]:
        texts = (f"{name} {each}: say hello." for each in range(number))
        return [await ask(port, options.model, keys[name], text, 8) for text in texts]

    await probes("quiet", 3)
    delays = {"one key alone": await probes("quiet", options.probes)}
    floods = (flood(port, keys["flood"], number, options) for number in range(options.flood))
    flooding = [asyncio.create_task(each) for each in floods]
    try:
        await asyncio.sleep(3)
        delays["premium key beside the flood"] = await probes("premium", options.probes)
        delays["another key beside the flood"] = await probes("quiet", options.probes)
        delays["the flood's own key"] = await probes("flood", 3)
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.wait(flooding)
    return delays


async def flood(port: int, secret: str, number: int, options: argparse.Namespace) -> None:
    for turn in range(10_000):
        with contextlib.suppress(OSError):
            await ask(port, options.model, secret, f"{number} {turn}: tell a long story.", ANSWER, whole=True)


async def ask(port: int, model: str, secret: str, text: str, tokens: int, *, whole: bool = False) -> float:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {secret}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + body)
            answer = b""
            while b'"content":"' not in answer.replace(b'"content":""', b""):
                part = await reader.read(65_536)
                if not part:
                    raise OSError(answer[:200].decode(errors="replace"))
                answer += part
            delay = time.perf_counter() - began
            while whole and await reader.read(65_536):
                pass
        finally:
            writer.close()
    return delay


def table(options: argparse.Namespace, delays: dict[str, list[float]]) -> str:
    where = f"{os.cpu_count()} cores, shared with the clients; load average {os.getloadavg()[0]:.1f}"
    command = f"python tests/bench/key_flood.py --flood {options.flood} --model {options.model}"
    lines = [
        f"\n{where}; {dt.datetime.now(dt.UTC).date()}; `{command}`\n",
        "| requests from | requests | p50 | p95 | longest |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for who, values in delays.items():
        ordered = sorted(values)
        points = (ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)], ordered[-1])
        cells = " | ".join(f"{point * 1e3:,.0f} ms" for point in points)
        lines.append(f"| {who} | {len(ordered)} | {cells} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
