"""What drafts gain where answers repeat and cost where they do not: an engine with and one without, by turns.

    python -P tests/bench/draft_cost.py MODEL_DIR [--quant none] [--rounds 5] [--streams 1,8] [--prompt 64]
        [--output 96] [--threads 2] [--ctx 2048] [--draft DRAFT_DIR] [--work repeats,new] [--one-engine]
        [--longest TOKENS]

repeats     greedy: random weights soon say the same few tokens again and again, real ones where they quote
misleads    sampled among 30 ids: nearly every pair of tokens stood before, and what followed it says nothing
new         sampled at temperature 1 among all ids
unlike      greedy without repetitions: what a draft model can guess and n-grams cannot
cycle       greedy, for a target of `random_model.py --agreement`: no token occurs twice
tools, edits, quotes, forms, adverse    recorded answers, see `agent_traces.py`

`--draft` adds a draft model (`random_model.py --draft` makes a pair that often agrees, `--agreement` one that
agrees so often).

`--one-engine` compares an engine with itself, with drafts turned off by turns: two engines have their weights
in other pages, which may differ by some hundredths. Not with `--draft`. `--longest` cuts recorded answers.

`--cpu-time` counts seconds of CPU time instead, for a machine that others use too: with `--threads 1` these
are about the seconds that it would take alone.

Both have the same prompts, new ones in each round. Shown are tokens a second of wall clock, the ratio of both
(median, smallest and largest, and the geometric mean with its standard error), and what the machine's
load does not change: drafts that were right, tokens a step of each request, and rows in vain.
"""

import argparse
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent))

from agent_traces import follow, make_traces

WORK: dict[str, dict[str, Any]] = {
    "repeats": {"temperature": 0.0},
    "misleads": {"temperature": 1.0, "allowed_token_ids": tuple(range(1000, 1030))},
    "new": {"temperature": 1.0},
    "unlike": {"temperature": 0.0, "repetition_penalty": 2.0},
    "cycle": {"temperature": 0.0},
}
TRACES = "tools", "edits", "quotes", "forms", "adverse"
SCRIPTS: dict[str, list[int]] = {}
"""Recorded answers by request id."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--streams", default="1,8")
    parser.add_argument("--draft")
    parser.add_argument("--work", default="repeats,misleads,new")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--one-engine", action="store_true")
    parser.add_argument("--longest", type=int)
    for name, value in (("rounds", 5), ("prompt", 64), ("output", 96), ("threads", 2), ("ctx", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    engines = {"auto": load(options, "auto")}
    engines["off"] = engines["auto"] if options.one_engine else load(options, "off")
    rows = {name: engine.scheduler.drafting._rows for name, engine in engines.items()} | {"off": 0}
    for engine in {id(each): each for each in engines.values()}.values():
        # The first steps touch memory for the first time.
        follow(engine, SCRIPTS)
        if options.cpu_time:
            drafting: Any = engine.scheduler.drafting
            for timed in (drafting, *drafting._models):
                timed._clock = time.process_time
        run(engine, options, "new", 8, -1)
    for work in options.work.split(","):
        for streams in map(int, options.streams.split(",")):
            compare(engines, rows, options, work, streams)


def compare(
    engines: dict[str, Engine], rows: dict[str, int], options: argparse.Namespace, work: str, streams: int
) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    tokens, before = 0, engines["auto"].stats()
    for number in range(options.rounds):
        for name in sorted(engines, reverse=number % 2 == 1):
            engines[name].scheduler.drafting._rows = rows[name]
            first = engines[name].stats().output_tokens
            speeds[name].append(run(engines[name], options, work, streams, number))
            if name == "auto":
                tokens += engines[name].stats().output_tokens - first
    after = engines["auto"].stats()
    ratios = [on / off for on, off in zip(speeds["auto"], speeds["off"], strict=True)]
    logs = [math.log(ratio) for ratio in ratios]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    drafted = after.draft_tokens - before.draft_tokens
    right = after.accepted_tokens - before.accepted_tokens
    print(
        f"{work:9} {streams:2} streams  off {statistics.median(speeds['off']):7.1f}  "
        f"auto {statistics.median(speeds['auto']):7.1f} tok/s  "
        f"ratio {statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}], "
        f"mean {math.exp(statistics.mean(logs)):.3f} ± {error:.3f}  right {right}/{drafted}  "
        f"{tokens / (tokens - right):.2f} tokens a step  in vain {(drafted - right) / tokens:.3f} a token",
        flush=True,
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
    for request in requests(engine, options, work, streams, number):
        engine.add(request)
    while engine.stats().waiting or any(not request.num_output for request in engine.scheduler.running):
        engine.step()
    clock = time.process_time if options.cpu_time else time.perf_counter
    first, start = engine.stats().output_tokens, clock()
    while engine.has_work:
        engine.step()
    return (engine.stats().output_tokens - first) / (clock() - start)


def requests(
    engine: Engine, options: argparse.Namespace, work: str, streams: int, number: int
) -> list[AddRequest]:
    names = [f"{work}-{number}-{stream}" for stream in range(streams)]
    if work in TRACES:
        traces = make_traces(work, streams, f"{streams} {number}")
        traces = [trace._replace(answer=trace.answer[: options.longest]) for trace in traces]
        if (vocabulary := traces[-1].vocabulary) is not None:
            engine.set_vocabulary(vocabulary)
        SCRIPTS.update(zip(names, (trace.answer for trace in traces), strict=True))
        return [
            AddRequest(
                request_id=name,
                prompt_ids=trace.prompt,
                params=SamplingParams(max_tokens=len(trace.answer), temperature=0.0, grammar=trace.grammar),
            )
            for name, trace in zip(names, traces, strict=True)
        ]
    rng = random.Random(f"{work} {streams} {number}")
    ids = WORK[work].get("allowed_token_ids") or range(engine.info.vocab_size)
    found = []
    for name in names:
        prompt = [rng.choice(ids) for _ in range(options.prompt)]
        params = SamplingParams(max_tokens=options.output, seed=rng.randrange(1 << 40), **WORK[work])
        found.append(AddRequest(request_id=name, prompt_ids=prompt, params=params))
    return found


if __name__ == "__main__":
    main()
