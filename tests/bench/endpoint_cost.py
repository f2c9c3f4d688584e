"""The endpoint beside the engine alone, by turns: the same work over HTTP, and by an engine in this process.

    python -P tests/bench/endpoint_cost.py MODEL [--quant int8] [--streams 1,8,32] [--rounds 5]
        [--prompt 128] [--output 64]

Both have the daemon's defaults, without drafts. Requests of a turn are sent together, with prompts that
neither has seen. A ratio is the endpoint's output tokens a second over the engine's of the same round; of
decoding: without what comes before all streams have a token. Beside it stands the processor time of the
daemon, of its engine and of the client for each token: client and daemon take the cores that the engine
computes on.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from llmbox.app.bench.client import Prompts, Workload, uniform
from llmbox.app.bench.measure import run
from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.peer_servers import Server
from bench.peers import IDS, Started

CONTEXT = 4096
IDLE_S = 1.0
"""Rest of the served engine before a turn, in which it prepares the next steps as the other one does."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    options = parser.parse_args()
    sizes = [int(size) for size in options.streams.split(",")]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="llmbox-endpoint-") as folder:
        for size in sizes:
            started = Started(server(options, size, Path(folder)), Path(folder))
            try:
                compare(started, load(options, size), size, options)
            finally:
                started.stop()


def pool(size: int, options: argparse.Namespace) -> int:
    return max(CONTEXT, size * (options.prompt + options.output + 32))


def server(options: argparse.Namespace, size: int, folder: Path) -> Server:
    return Server(
        name="llmbox",
        width=options.quant,
        command=[
            sys.executable, "-P", "-m", "llmbox", "serve", str(options.model), "--alias", "bench",
            "--quant", options.quant, "--ctx", str(CONTEXT), "--threads", "2", "--port", "{port}",
            "--max-running", str(max(32, size)), "--kv-tokens", str(pool(size, options)),
            "--data-dir", str(folder), "--speculate", "off",
        ],
    )  # fmt: skip


def load(options: argparse.Namespace, size: int) -> Engine:
    config = EngineConfig(
        model_path=str(options.model),
        name="bench",
        device="cpu",
        quant=options.quant,
        threads=2,
        context=CONTEXT,
        max_running=max(32, size),
        kv_tokens=pool(size, options),
        speculate="off",
    )
    return load_engine(config, lambda _: None)


def compare(started: Started, engine: Engine, size: int, options: argparse.Namespace) -> None:
    daemon = psutil.Process(started.process.pid)
    own = psutil.Process()
    ratios, decoding, alone, served = [], [], [], []
    costs: list[tuple[float, float, float]] = []
    for number in range(options.rounds + 1):
        sides = (
            lambda work: alone.append(step_all(engine, work)),
            lambda work: served.append(serve_all(started, work, daemon, own, costs)),
        )
        for side in sides if number % 2 else sides[::-1]:
            prompts = Prompts(f"{size}/{number}/{time.time_ns()}", IDS)
            side(uniform(prompts, size, size, options.prompt, options.output))
        ratios.append(served[-1][0] / alone[-1][0])
        decoding.append(served[-1][1] / alone[-1][1])
    del ratios[0], decoding[0], costs[0], alone[0], served[0]  # the first round warms both
    taken = [statistics.median(column) * 1e6 / (size * options.output) for column in zip(*costs, strict=True)]
    print(
        f"{options.quant} {size} streams: "
        f"engine alone {statistics.median(rate for rate, _ in alone):.1f} tok/s, "
        f"endpoint {statistics.median(rate for rate, _ in served):.1f}, ratio {spread(ratios)}, of decoding "
        f"{spread(decoding)}; processor time a token in us: daemon {taken[0]:.0f}, client {taken[2]:.0f}, "
        f"engine {taken[1]:.0f}",
        flush=True,
    )


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def step_all(engine: Engine, work: Workload) -> tuple[float, float]:
    """Return tokens a second of the whole work, and from the step on after which all requests had one."""
    while engine.prepare():
        pass
    began = time.perf_counter()
    tokens, made, first = 0, [], (0.0, 0)
    for number, ask in enumerate(work.asks):
        params = SamplingParams(max_tokens=ask.max_tokens, min_tokens=ask.max_tokens, temperature=0.0)
        engine.add(AddRequest(request_id=f"r{number}", prompt_ids=ask.prompt, params=params))
        tokens += ask.max_tokens
    while engine.has_work:
        made += [output.request_id for output in engine.step().outputs]
        if not first[1] and len(set(made)) == len(work.asks):
            first = time.perf_counter(), len(made)
    ended = time.perf_counter()
    return tokens / (ended - began), (tokens - first[1]) / (ended - first[0])


def serve_all(
    started: Started,
    work: Workload,
    daemon: psutil.Process,
    own: psutil.Process,
    costs: list[tuple[float, float, float]],
) -> tuple[float, float]:
    """Return what `step_all` does, as the client saw it."""
    time.sleep(IDLE_S)
    before = [seconds(daemon), seconds(*daemon.children(recursive=True)), seconds(own)]
    done = asyncio.run(run(started.target, work))
    after = [seconds(daemon), seconds(*daemon.children(recursive=True)), seconds(own)]
    if done.errors:
        raise SystemExit(done.errors[0])
    costs.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
    first = max(sample.token_times[0] for sample in done.good())
    times = [at for sample in done.good() for at in sample.token_times]
    left = sum(sample.tokens for sample in done.good()) - sum(at <= first for at in times)
    return done.output_rate, left / (max(times) - first)


def seconds(*processes: psutil.Process) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


if __name__ == "__main__":
    main()
