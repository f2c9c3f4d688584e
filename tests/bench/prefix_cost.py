"""What the prefix cache costs where it finds nothing: processor time a token, with it and without.

    python -P tests/bench/prefix_cost.py MODEL_DIR [--quant none] [--rounds 10] [--requests 8] [--prompt 256]
        [--output 96] [--threads 1] [--ctx 2048]

Three engines in one process take turns with the same new prompts: two without the cache, `off` and
`control`, and one with it, `on`. What `control` differs from `off` by is what such a comparison cannot tell.
One thread, so that nobody waits spinning for others, and processor time, so that other programs cost nothing
but what they take of caches and memory. Page faults are counted too: a young engine touches its KV memory for
the first time.
"""

import argparse
import gc
import math
import random
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

ENGINES = {"off": False, "control": False, "on": True}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one round, a token."""

    micros: float
    faults: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="none")
    for name, value in (("rounds", 10), ("requests", 8), ("prompt", 256), ("output", 96), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ctx", type=int, default=2048)
    options = parser.parse_args()
    engines = {name: load(options, caching) for name, caching in ENGINES.items()}
    costs: dict[str, list[Cost]] = {name: [] for name in engines}
    names = list(engines)
    gc.disable()
    for number in range(options.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            costs[name].append(run(engines[name], options, number))
        gc.collect()
    for name, engine in engines.items():
        assert engine.stats().prefix_hits == 0
        faults = [cost.faults for cost in costs[name]]
        early, late = statistics.mean(faults[:3]), statistics.mean(faults[3:] or faults)
        micros = statistics.median(cost.micros for cost in costs[name])
        print(
            f"{name:8} {micros:8.1f} us a token, {early:.2f} page faults in the first three rounds, "
            f"{late:.2f} later"
        )
    for name, other in (("control", "off"), ("on", "off"), ("on", "control")):
        pairs = zip(costs[name], costs[other], strict=True)
        ratios = [one.micros / two.micros for one, two in pairs]
        logs = [math.log(ratio) for ratio in ratios]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        print(
            f"{name} / {other}: {math.exp(statistics.mean(logs)):.3f}, standard error {error:.3f}; "
            f"median {statistics.median(ratios):.3f}; from {min(ratios):.2f} to {max(ratios):.2f}"
        )


def load(options: argparse.Namespace, caching: bool) -> Engine:
    config = EngineConfig(
        model_path=str(options.model),
        name=options.model.name,
        device="cpu",
        quant=options.quant,
        speculate="off",
        threads=options.threads,
        context=options.ctx,
        prefix_cache=caching,
    )
    return load_engine(config, lambda _: None)


def run(engine: Engine, options: argparse.Namespace, number: int) -> Cost:
    rng = random.Random(number)
    for request in range(options.requests):
        ids = [rng.randrange(engine.info.vocab_size) for _ in range(options.prompt)]
        params = SamplingParams(max_tokens=options.output, min_tokens=options.output, temperature=0.0)
        engine.add(AddRequest(request_id=f"r{number}-{request}", prompt_ids=ids, params=params))
    began, faults = time.process_time(), page_faults()
    while engine.has_work:
        engine.step()
    tokens = options.requests * (options.prompt + options.output)
    return Cost((time.process_time() - began) * 1e6 / tokens, (page_faults() - faults) / tokens)


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    main()
