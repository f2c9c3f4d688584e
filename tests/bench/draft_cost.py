"""What drafts gain where answers repeat and cost where they do not: an engine with and one without, by turns.

    python -P tests/bench/draft_cost.py MODEL_DIR [--quant none] [--rounds 5] [--streams 1,8] [--prompt 64]
        [--output 96] [--threads 2] [--ctx 2048] [--draft DRAFT_DIR]

repeats     greedy: random weights soon say the same few tokens again and again, real ones where they quote
misleads    sampled among 30 ids: nearly every pair of tokens stood before, and what followed it says nothing
new         sampled at temperature 1 among all ids
unlike      greedy without repetitions: what a draft model can guess and n-grams cannot

`--draft` adds a draft model (`random_model.py --draft` makes a pair that often agrees).

Both have the same prompts, new ones in each round. Shown are tokens a second of wall clock, the ratio of both
(geometric mean, standard error over the rounds), the share of guesses that were right, and rows in vain.
"""

import argparse
import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

WORK: dict[str, dict[str, Any]] = {
    "repeats": {"temperature": 0.0},
    "misleads": {"temperature": 1.0, "allowed_token_ids": tuple(range(1000, 1030))},
    "new": {"temperature": 1.0},
    "unlike": {"temperature": 0.0, "repetition_penalty": 2.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--draft")
    parser.add_argument("--work", default="repeats,misleads,new")
    for name, value in (("rounds", 5), ("prompt", 64), ("output", 96), ("threads", 2), ("ctx", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    engines = {speculate: load(options, speculate) for speculate in ("off", "auto")}
    for engine in engines.values():  # the first steps touch memory for the first time
        run(engine, options, "new", 8, -1)
    for work in options.work.split(","):
        for streams in map(int, options.streams.split(",")):
            compare(engines, options, work, streams)


def compare(engines: dict[str, Engine], options: argparse.Namespace, work: str, streams: int) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    before = engines["auto"].stats()
    for number in range(options.rounds):
        for name in sorted(engines, reverse=number % 2 == 1):
            speeds[name].append(run(engines[name], options, work, streams, number))
    after = engines["auto"].stats()
    logs = [math.log(on / off) for on, off in zip(speeds["auto"], speeds["off"], strict=True)]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    drafted = after.draft_tokens - before.draft_tokens
    right = after.accepted_tokens - before.accepted_tokens
    tokens = after.output_tokens - before.output_tokens
    print(
        f"{work:9} {streams:2} streams  off {statistics.median(speeds['off']):7.1f}  "
        f"auto {statistics.median(speeds['auto']):7.1f} tok/s  "
        f"ratio {math.exp(statistics.mean(logs)):.3f} ± {error:.3f}  "
        f"right {right}/{drafted}  in vain {(drafted - right) / tokens:.3f} a token"
    )


def load(options: argparse.Namespace, speculate: str) -> Engine:
    config = EngineConfig(
        model_path=str(options.model),
        name=speculate,
        device="cpu",
        quant=options.quant,
        threads=options.threads,
        context=options.ctx,
        kv_tokens=8 * options.ctx,
        speculate=speculate,
        draft_path=None if speculate == "off" else options.draft,
        prefix_cache=False,
    )
    return load_engine(config, lambda _: None)


def run(engine: Engine, options: argparse.Namespace, work: str, streams: int, number: int) -> float:
    """Tokens a second, from the first token of all on."""
    rng = random.Random(f"{work} {streams} {number}")
    ids = WORK[work].get("allowed_token_ids") or range(engine.info.vocab_size)
    for stream in range(streams):
        prompt = [rng.choice(ids) for _ in range(options.prompt)]
        params = SamplingParams(max_tokens=options.output, seed=rng.randrange(1 << 40), **WORK[work])
        engine.add(AddRequest(request_id=f"{number}-{stream}", prompt_ids=prompt, params=params))
    while engine.stats().waiting or any(not request.num_output for request in engine._scheduler.running):
        engine.step()
    first, start = engine.stats().output_tokens, time.perf_counter()
    while engine.has_work:
        engine.step()
    return (engine.stats().output_tokens - first) / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
