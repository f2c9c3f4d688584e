"""Every layer of the engine at once, and each left out: same requests, same tokens, what each is worth.

    python -P tests/bench/all_layers.py [MODEL_DIR] [--rounds N] [--only NAME ...]

All at once: continuous batching, prefix cache, int8 weights, int8 KV cache, chunked prefill, speculative
decoding, two ranks (`--tp 2`) and two classes of priority. In each other engine one of them is left out. The
engines take turns: one is loaded, computes the whole load after a short warm-up, and is stopped.

The load: chats that share one of two long beginnings, one long prompt, and premium requests that come while
those run. Without MODEL_DIR it is a random model of Qwen3-0.6B's shape, which reads as much as others do. The
share of accepted drafts is printed: what speculative decoding is worth depends on it.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from llmbox.app.engines.supervisor import Supervisor
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))

LEFT_OUT: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    "continuous batching": {"batching": "static"},
    "prefix cache": {"prefix_cache": False},
    "int8 weights": {"quant": "none"},
    "int8 KV cache": {"kv_dtype": "auto"},
    "chunked prefill": {"chunked_prefill": False},
    "speculation": {"speculate": "off"},
    "two ranks": {"tp": 1},
    "priorities": {},
}
"""Settings that leave a layer out. Priorities are left out of the requests."""
OTHER_NUMBERS: Final = {"int8 weights", "int8 KV cache", "two ranks"}
"""Without these the engine computes other numbers, so that tokens may differ."""


@dataclass
class Figures:
    seconds: float
    tokens: dict[str, list[int]]
    gaps: list[float]
    """Seconds between the tokens of a stream."""
    premium: list[float]
    """Seconds to the first token of premium requests."""
    accepted: float
    """Share of the output tokens that were accepted drafts."""
    hits: float
    """Share of the prompt tokens that the prefix cache had."""

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens.values())) / self.seconds


@dataclass
class TimedRequest:
    seconds: float
    """Seconds after the start at which it is sent."""
    message: AddRequest
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    async def run(self, supervisor: Supervisor) -> None:
        await asyncio.sleep(self.seconds)
        last = began = time.perf_counter()
        async for output in supervisor.submit(self.message):
            if not output.token_ids:
                continue
            now = time.perf_counter()
            if self.first is None:
                self.first = now - began
            else:
                self.gaps.append(now - last)
            last = now
            self.token_ids += output.token_ids


def make_load(seed: int, *, priorities: bool, scale: float) -> list[TimedRequest]:
    rng = random.Random(seed)

    def ids(count: float) -> list[int]:
        return [rng.randrange(1000, 100_000) for _ in range(int(count))]

    def request(name: str, seconds: float, prompt: list[int], max_tokens: float, priority: int = 0):
        params = SamplingParams(max_tokens=int(max_tokens))
        message = AddRequest(
            request_id=name,
            prompt_ids=prompt,
            params=params,
            priority=priority if priorities else 0,
        )
        return TimedRequest(seconds, message)

    beginnings = [ids(512 * scale) for _ in range(2)]
    load = [
        request(f"chat{number}", 0.05 * number, beginnings[number % 2] + ids(48), rng.choice((24, 48, 96)))
        for number in range(12)
    ]
    load.append(request("long", 1.0, ids(2048 * scale), 8))
    load += [request(f"premium{number}", 0.5 + 0.7 * number, ids(64), 16, -1) for number in range(6)]
    return load


async def measure(config: EngineConfig, load: list[TimedRequest]) -> Figures:
    supervisor = Supervisor(config)
    try:
        await supervisor.start()
        warm = AddRequest(
            request_id="warm", prompt_ids=list(range(1000, 1064)), params=SamplingParams(max_tokens=8)
        )
        async for _ in supervisor.submit(warm):
            pass
        began = time.perf_counter()
        await asyncio.gather(*(request.run(supervisor) for request in load))
        seconds = time.perf_counter() - began
        stats = supervisor.stats
    finally:
        await supervisor.stop()
    tokens = {request.message.request_id: request.token_ids for request in load}
    return Figures(
        seconds=seconds,
        tokens=tokens,
        gaps=[gap for request in load for gap in request.gaps],
        premium=[request.first or 0.0 for request in load if "premium" in request.message.request_id],
        accepted=stats.accepted_tokens / sum(map(len, tokens.values())),
        hits=stats.prefix_hits / max(1, stats.prefix_queries),
    )


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(name: str, rounds: list[Figures], whole: list[Figures]) -> None:
    same = sum(
        figures.tokens[request] == ids
        for figures, others in zip(rounds, whole, strict=True)
        for request, ids in others.tokens.items()
    )
    total = sum(len(others.tokens) for others in whole)
    worth = statistics.median(
        others.rate / figures.rate for figures, others in zip(rounds, whole, strict=True)
    )
    gaps = [gap for figures in rounds for gap in figures.gaps]
    premium = [seconds for figures in rounds for seconds in figures.premium]
    numbers = " (other numbers)" if name in OTHER_NUMBERS else ""
    print(
        f"| {name} | {statistics.median(each.rate for each in rounds):.1f} | {worth:.2f} "
        f"| {percentile(premium, 0.5):.2f} / {max(premium):.2f} | {1e3 * percentile(gaps, 0.5):.0f} / "
        f"{1e3 * percentile(gaps, 0.99):.0f} / {1e3 * max(gaps):.0f} | {rounds[0].hits:.0%} "
        f"| {rounds[0].accepted:.0%} | {same} of {total}{numbers} |"
    )


async def run(options: argparse.Namespace) -> None:
    whole = EngineConfig(
        model_path=options.model, name="all", device="cpu", quant="int8", kv_dtype="int8", context=4096,
        speculate="on", tp=2, threads=2, max_running=8, token_budget=256, kv_tokens=options.kv_tokens,
    )  # fmt: skip
    names = [name for name in LEFT_OUT if name == "nothing" or not options.only or name in options.only]
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            load = make_load(options.seed + number, priorities=name != "priorities", scale=options.scale)
            found[name].append(await measure(replace(whole, **LEFT_OUT[name]), load))
    print(
        "| left out | output tok/s | all / this | premium TTFT s, median / worst "
        "| between tokens ms, median / p99 / worst | prefix hits | accepted drafts | same tokens |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in names:
        show(name, found[name], found["nothing"])
    unequal = [
        name
        for name in names
        if name not in OTHER_NUMBERS
        and any(a.tokens != b.tokens for a, b in zip(found[name], found["nothing"], strict=True))
    ]
    if unequal:
        raise SystemExit(f"other tokens without {', '.join(unequal)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="left out of all: these alone")
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--scale", type=float, default=1.0, help="of the prompts' lengths")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmbox-layers-") as folder:
        if options.model is None:
            from random_model import SHAPES, write_model

            options.model = str(write_model(Path(folder, "qwen3-0.6b"), SHAPES["qwen3-0.6b"]))
        asyncio.run(run(options))


if __name__ == "__main__":
    main()
