"""Time between tokens of running streams while long prompts arrive: one engine beside a pair of engines.

    OMP_NUM_THREADS=1 python -P tests/bench/disaggregation.py MODEL_DIR [--pair 1:1] [--rounds N]

Both are loaded, and take turns: streams alone, then the same streams while one prompt after another is
computed (the next one comes when the one before has its token). The single engine has as many threads as the
pair has cores, and computes prompts in chunks between tokens.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass, field, replace

from llmbox.app.engines.supervisor import Supervisor
from llmbox.engine.config import EngineConfig, parse_disaggregate
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams


@dataclass
class Figures:
    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of a stream."""
    tokens: int = 0
    prompts: list[float] = field(default_factory=list)
    """Seconds to the first token of each long prompt."""
    seconds: float = 0.0


class Bench:
    def __init__(self, supervisor: Supervisor, options: argparse.Namespace) -> None:
        self.supervisor, self.options = supervisor, options
        self.random = random.Random(options.seed)
        self.count = 0
        self.alone, self.loaded = Figures(), Figures()

    def submit(self, prompt_tokens: int, max_tokens: int):
        self.count += 1
        ids = [self.random.randrange(1000, 100_000) for _ in range(prompt_tokens)]
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=self.count)
        return self.supervisor.submit(AddRequest(request_id=f"r{self.count}", prompt_ids=ids, params=params))

    async def measure(self, seconds: float, *, prompts: bool) -> None:
        figures = self.loaded if prompts else self.alone
        streams = [self.submit(32, 8000) for _ in range(self.options.streams)]
        self.is_measuring, self.is_over = False, False
        readers = [asyncio.create_task(self.read(stream, figures)) for stream in streams]
        loader = asyncio.create_task(self.load(figures)) if prompts else None
        await asyncio.sleep(3.0)
        self.is_measuring, began = True, time.perf_counter()
        await asyncio.sleep(seconds)
        self.is_measuring, self.is_over = False, True
        figures.seconds += time.perf_counter() - began
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*readers)
        if loader is not None:
            self.prompt.cancel()
            await loader

    async def read(self, stream, figures: Figures) -> None:
        last = None
        async for output in stream:
            now = time.perf_counter()
            if self.is_measuring and output.token_ids:
                figures.tokens += len(output.token_ids)
                if last is not None:
                    figures.gaps.append(now - last)
            last = now

    async def load(self, figures: Figures) -> None:
        while not self.is_over:
            began = time.perf_counter()
            self.prompt = self.submit(self.options.prompt, 1)
            async for output in self.prompt:
                if output.token_ids and self.is_measuring:
                    figures.prompts.append(time.perf_counter() - began)


def be_first() -> None:
    """Read tokens as soon as they come where all run under `chrt -r`: engines would have slices of 100 ms."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        priority = os.sched_getparam(0).sched_priority
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority + 1))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def show(name: str, bench: Bench) -> None:
    for what, figures in {"streams alone": bench.alone, "with prompts": bench.loaded}.items():
        gaps = figures.gaps
        print(
            f"{name:10} {what:14} between tokens: median {1e3 * percentile(gaps, 0.5):6.1f} "
            f"p95 {1e3 * percentile(gaps, 0.95):6.1f} p99 {1e3 * percentile(gaps, 0.99):6.1f} "
            f"most {1e3 * max(gaps):6.1f} ms, {figures.tokens / figures.seconds:6.1f} tok/s; "
            f"{len(figures.prompts) / figures.seconds * bench.options.prompt:6.0f} prompt tok/s, "
            f"first token after {statistics.median(figures.prompts or [0.0]):5.1f} s ({len(figures.prompts)})"
        )
    ratio = percentile(bench.loaded.gaps, 0.99) / percentile(bench.alone.gaps, 0.99)
    print(f"{name:10} p99 with prompts is {ratio:.2f} times that of streams alone")


async def run(options: argparse.Namespace) -> None:
    pair = parse_disaggregate(options.pair)
    assert pair is not None
    common = EngineConfig(
        model_path=options.model, name="one", device="cpu", quant=options.quant, context=options.context,
        speculate="off", max_running=8, kv_tokens=2 * options.context,
    )  # fmt: skip
    configs = {"one": replace(common, threads=sum(pair)), "pair": replace(common, disaggregate=pair)}
    benches = {name: Bench(Supervisor(config), options) for name, config in configs.items()}
    try:
        for bench in benches.values():
            await bench.supervisor.start()
        be_first()
        await asyncio.sleep(options.idle)  # engines clear the memory of their KV cache while nothing runs
        for _ in range(options.rounds):
            for bench in benches.values():
                await bench.measure(options.alone, prompts=False)
                await bench.measure(options.loaded, prompts=True)
        for name, bench in benches.items():
            show(name, bench)
        print(benches["pair"].supervisor.stats)
    finally:
        for bench in benches.values():
            await bench.supervisor.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--pair", default="1:1")
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", type=float, default=10.0)
    parser.add_argument("--loaded", type=float, default=25.0)
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
