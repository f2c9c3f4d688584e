"""Goodput under more load than an engine can serve: admission by the queue's limit beside that by targets.

    OMP_NUM_THREADS=1 python -P tests/bench/admission.py MODEL_DIR --rate 20 --targets 500/60 [--rounds N]
    OMP_NUM_THREADS=1 python -P tests/bench/admission.py MODEL_DIR --burst 26 --targets 500/60 [--rounds N]

A daemon's services are made twice, each with an engine of its own, and take turns. Requests come at random
moments at a steady rate, or in bursts of so many at the same moment to an idle engine; one that is refused is
not sent again. Good requests had their first token and their tokens within the targets.
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmbox.app.bench.measure import percentile
from llmbox.app.config.entries import find_target
from llmbox.app.config.paths import find_paths
from llmbox.app.config.settings import Settings
from llmbox.app.daemon.compose import DaemonParts, compose
from llmbox.app.errors import ApiError
from llmbox.app.gateway.generation import Generation
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.sampling_params import SamplingParams


@dataclass
class Figures:
    sent: int = 0
    refused: int = 0
    good: int = 0
    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)


class Side:
    def __init__(self, admission: str, options: argparse.Namespace, folder: Path) -> None:
        self.name, self.options, self.figures = admission, options, Figures()
        usage = replace(Settings().usage, targets=(f"*={options.targets}",))
        limits = replace(Settings().limits, admission=admission, queue=options.queue)
        paths = find_paths(folder)
        paths.create()
        self.services = compose(
            replace(Settings(), usage=usage, limits=limits), paths, DaemonParts(Launch(), load_model_text)
        )
        self.target = find_target(usage.targets, "m")
        self.random = random.Random(options.seed)
        self.count = 0

    async def start(self) -> None:
        config = EngineConfig(model_path=self.options.model, name="m", device="cpu", quant=self.options.quant)
        self.services.request_log.start()
        self.model = await self.services.engines.load(config)
        for size in (self.options.prompt, self.options.prompt * 4):  # the first steps are measured
            await asyncio.gather(*(self.ask(size, Figures()) for _ in range(4)))

    async def ask(self, prompt: int, figures: Figures, began: float | None = None) -> None:
        self.count += 1
        ids = [self.random.randrange(300, 1500) for _ in range(prompt)]
        generation = Generation(
            id=f"r{self.count}", endpoint="bench", model=self.model, prompts=[ids],
            max_tokens=self.options.output,
            params=SamplingParams(max_tokens=1, temperature=0.0),
        )  # fmt: skip
        figures.sent += 1
        began = began or time.monotonic()
        generation.clock.arrived = began
        try:
            opened = self.services.gateway.open(generation)
        except ApiError:
            figures.refused += 1
            return
        first = last = None
        tokens = 0
        with opened:
            async for delta in opened.deltas():
                if delta.token_ids:
                    last = time.monotonic()
                    first = first or last
                    tokens += len(delta.token_ids)
        if first is None or last is None:
            return
        ttft, tpot = first - began, (last - first) / max(1, tokens - 1)
        figures.ttft.append(ttft)
        figures.tpot.append(tpot)
        figures.good += ttft <= self.target.ttft and tpot <= self.target.tpot

    async def round(self) -> None:
        began, asked = time.monotonic(), []
        while self.options.burst and time.monotonic() - began < self.options.seconds:
            now = time.monotonic()
            sizes = [self.size() for _ in range(self.options.burst)]
            await asyncio.gather(*(self.ask(size, self.figures, now) for size in sizes))
            await asyncio.sleep(self.options.pause)
        while not self.options.burst and time.monotonic() - began < self.options.seconds:
            asked.append(asyncio.create_task(self.ask(self.size(), self.figures)))
            await asyncio.sleep(self.random.expovariate(self.options.rate))
        await asyncio.gather(*asked)
        self.figures.seconds += time.monotonic() - began

    def size(self) -> int:
        """Prompt tokens of the next request."""
        return int(self.options.prompt * self.random.choice((1, 1, 1, 4)))

    def show(self) -> None:
        figures = self.figures
        answered = max(1, figures.sent - figures.refused)
        print(
            f"{self.name:6} {figures.sent} sent, {figures.refused} refused, {figures.good} good: "
            f"{figures.good / figures.sent:.0%} of all, {figures.good / answered:.0%} of the answered; "
            f"goodput {figures.good / figures.seconds:.2f} a second"
        )
        for name, values in {"TTFT": figures.ttft, "TPOT": figures.tpot}.items():
            p50, p95 = (1e3 * (percentile(values, percent) or 0.0) for percent in (50, 95))
            print(f"       {name} p50 {p50:.0f} ms, p95 {p95:.0f} ms")
        queue = self.model.supervisor.queue
        print(f"       {queue.counts}, pace {queue.times.pace:.2f}")
        for behind, errors in queue.errors.items():
            print(f"       behind others {behind}: {errors.ttft.factor:.2f}, {errors.tpot.factor:.2f}")


async def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(name, options, Path(folder) / name) for name in ("queue", "slo")]
        try:
            for side in sides:
                await side.start()
            for _ in range(options.rounds):
                for side in sides:
                    await side.round()
            for side in sides:
                side.show()
        finally:
            for side in sides:
                await side.services.engines.close()
                await side.services.gateway.close()
                side.services.request_log.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--targets", default="500/60")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--burst", type=int, default=0, help="requests at once, instead of a rate")
    parser.add_argument("--pause", type=float, default=1.0, help="idle seconds after a burst")
    parser.add_argument("--prompt", type=int, default=128, help="a quarter is four times as long")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--queue", type=int, default=512)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
