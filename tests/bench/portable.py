"""Tokens that differ between instruction sets, ranks and disturbances; docs/cpu-kernels.md promises 0.

    OMP_NUM_THREADS=1 python -P tests/bench/portable.py [MODEL_DIR] [--seconds N] [--quant int8] [--ranks]
        [--sums FILE]

One engine answers random prompts alone, greedily and drawn; then engines of every instruction set of this
machine answer them under each disturbance. Rounds have other seeds, until the time is up. Without MODEL_DIR
the built-in model answers; --ranks has --tp 2, --tp 4 and --pp 2 answer too. --sums keeps what was counted
after each seed, so that a later run with the same options goes on with the next seed.
"""

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.kernels.dispatch import backends
from support.real_engines import ask, load, tokens

BUILTIN = Path(__file__).parents[2] / "app" / "assets" / "builtin"
DISTURBANCES: dict[str, dict[str, Any]] = {
    "batch": {"max_running": 16},
    "chunks": {"max_running": 16, "token_budget": 24},
    "cached": {"max_running": 16, "block_size": 16},
    "preempted": {"max_running": 16, "kv_tokens": 640},
    "no guesses": {"max_running": 16, "speculate": "off"},
    "killed": {"max_running": 16},
}
RANKS: dict[str, dict[str, Any]] = {"tp 2": {"tp": 2}, "tp 4": {"tp": 4}, "pp 2": {"pp": 2}}
STEPS_OF_A_LIFE = 20


def requests(seed: int, count: int, new: int, vocabulary: int) -> list[AddRequest]:
    """Prompts of up to 200 tokens, a third with a common beginning."""
    rng = random.Random(seed)
    common = [rng.randrange(3, vocabulary) for _ in range(64)]
    made = []
    for n in range(count):
        own = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 136))]
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": seed * count + n} if n % 2 else {}
        made.append(ask(f"r{n}", common + own if n % 3 == 0 else own, new, **drawn))
    return made


def killed(load_one: Callable[[], Engine], asked: list[AddRequest]) -> dict[str, list[int]]:
    """Answer as engines that end after some steps, each of which goes on with the tokens so far."""
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while asked:
        engine = load_one()
        for request in asked:
            engine.add(replace(request, output_ids=list(found[request.request_id])))
        for _ in range(STEPS_OF_A_LIFE):
            if not engine.has_work:
                break
            for output in engine.step().outputs:
                found[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    asked = [request for request in asked if request.request_id != output.request_id]
    return found


def answer(
    load_one: Callable[[], Engine], name: str, asked: list[AddRequest], seen: Counter[str]
) -> dict[str, list[int]]:
    """Answer under the disturbance `name`; `seen` counts what happened on the way."""
    if name == "killed":
        return killed(load_one, asked)
    engine = load_one()
    found = tokens(engine, asked)
    if name == "cached":
        found = tokens(engine, asked)
    stats = engine.stats()
    seen["preemptions"] += stats.preemptions
    seen["cache hits"] += stats.prefix_hits
    engine.close()
    return found


def differing(found: dict[str, list[int]], wanted: dict[str, list[int]]) -> int:
    """Count tokens that are not the wanted ones, and missing ones."""
    return sum(
        len(ids) - sum(one == other for one, other in zip(ids, found[name], strict=False))
        for name, ids in wanted.items()
    )


@dataclass
class PortableSums:
    """Counts over all runs of one set of options: tokens compared, wrong ones, disturbances that happened."""

    path: Path | None
    options: str
    seeds: int = 0
    compared: int = 0
    wrong: int = 0
    seconds: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)

    def load(self) -> None:
        """Go on from the file, if it has counts of these options."""
        if self.path is None or not self.path.exists():
            return
        kept = json.loads(self.path.read_text()).get(self.options)
        if kept is not None:
            self.seeds, self.compared, self.wrong, self.seconds = (
                kept[name] for name in ("seeds", "compared", "wrong", "seconds")
            )
            self.seen.update(kept["seen"])

    def save(self) -> None:
        """Write the counts beside those of other options; a run that is killed here leaves the old file."""
        if self.path is None:
            return
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        kept[self.options] = {
            "seeds": self.seeds,
            "compared": self.compared,
            "wrong": self.wrong,
            "seconds": round(self.seconds, 1),
            "seen": dict(self.seen),
        }
        written = self.path.with_name(self.path.name + ".new")
        written.write_text(json.dumps(kept, indent=1) + "\n")
        written.replace(self.path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--sums", type=Path)
    options = parser.parse_args()
    levels = [name for name in backends() if name.startswith("cpu ")]
    common = {"dtype": "bfloat16", "quant": options.quant, "kv_dtype": "int8", "exact": "portable"}
    cases = {(level, name): how for level in levels for name, how in DISTURBANCES.items()}
    if options.ranks:
        cases |= {(levels[0], name): how for name, how in RANKS.items()}
    named = (options.model.name, options.quant, options.requests, options.new, options.vocabulary, *cases)
    sums = PortableSums(options.sums, str(named))
    sums.load()
    begun = time.monotonic()
    seconds_before = sums.seconds
    while time.monotonic() - begun < options.seconds:
        asked = requests(sums.seeds, options.requests, options.new, options.vocabulary)
        os.environ["LLMBOX_KERNELS"] = levels[sums.seeds % len(levels)]
        alone = load(options.model, **common, max_running=1, prefix_cache=False, speculate="off")
        wanted = {}
        for request in asked:
            wanted |= tokens(alone, [request])
        for (level, name), how in cases.items():
            os.environ["LLMBOX_KERNELS"] = level
            found = answer(partial(load, options.model, **common, **how), name, asked, sums.seen)
            count = differing(found, wanted)
            sums.compared += sum(map(len, wanted.values()))
            sums.wrong += count
            if count:
                print(f"seed {sums.seeds}, {level}, {name}: {count} tokens differ", flush=True)
        sums.seeds += 1
        sums.seconds = seconds_before + time.monotonic() - begun
        sums.save()
    print(
        f"{sums.wrong} of {sums.compared:,} tokens differ; {sums.seeds} seeds in {sums.seconds:.0f} s; "
        + "; ".join(map(" ".join, cases))
    )
    print(", ".join(f"{count:,} {what}" for what, count in sums.seen.items()))


if __name__ == "__main__":
    main()
