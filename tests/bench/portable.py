"""Tokens that differ between instruction sets, ranks and disturbances; docs/cpu-kernels.md promises 0.

    OMP_NUM_THREADS=1 python -P tests/bench/portable.py [MODEL_DIR] [--seconds N] [--quant int8] [--ranks]
        [--sums FILE] [--answers FILE]

One engine answers random prompts alone, greedily and drawn; then engines of every instruction set of this
machine answer them under each disturbance. Rounds have other seeds, until the time is up. Without MODEL_DIR
the built-in model answers; --ranks has --tp 2, --tp 4 and --pp 2 answer too. --sums keeps what was counted
after each seed, so that a later run with the same options goes on with the next seed.

--answers keeps what was answered alone, with digests of the logits. A run that finds its seeds in the file
compares with them: copy the file to a machine of another kind and run the same command there. The exit status
is 1 if anything differs.
"""

import argparse
import ctypes
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmbox.engine.core.engine import Engine
from llmbox.engine.ipc.messages import AddRequest
from support.kernel_backends import backends
from support.real_engines import all_logits, ask, load, runner_of, tokens

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


def answer_alone(
    load_one: Callable[..., Engine], asked: list[AddRequest], vocabulary: int
) -> tuple[dict[str, list[int]], str]:
    """Answer one after the other, then compute a prompt's logits: the answers, and a digest of the bits."""
    engine = load_one(max_running=1, prefix_cache=False, speculate="off")
    found: dict[str, list[int]] = {}
    for request in asked:
        found |= tokens(engine, [request])
    logits = all_logits(runner_of(engine), [3 + 13 * i % (vocabulary - 3) for i in range(150)]).contiguous()
    return found, sha256(ctypes.string_at(logits.data_ptr(), logits.nbytes)).hexdigest()


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

    def add(self, wanted: dict[str, list[int]], wrong: int, told: str) -> None:
        """Count the tokens of one comparison, and print what was found wrong."""
        self.compared += sum(map(len, wanted.values()))
        self.wrong += wrong
        if wrong:
            print(f"seed {self.seeds}, {told}", flush=True)

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


@dataclass
class KnownAnswers:
    """Undisturbed answers of one set of options by seed, in a file that other machines read."""

    path: Path | None
    options: str

    def compare(self, seed: int, found: dict[str, list[int]], logits: str) -> tuple[int, str] | None:
        """Keep the answers of a seed that the file does not have, and return None.

        Otherwise returns the number of tokens that differ, and what is wrong with the logits.
        """
        if self.path is None:
            return None
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        seeds = kept.setdefault(self.options, {})
        if (known := seeds.get(str(seed))) is None:
            seeds[str(seed)] = {"machine": platform.machine(), "tokens": found, "logits": logits}
            self.path.write_text(json.dumps(kept) + "\n")
            return None
        differ = f"other logits than on {known['machine']}" if known["logits"] != logits else ""
        return differing(found, known["tokens"]), differ


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=BUILTIN)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seeds", type=int, default=sys.maxsize, help="end before this seed")
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--kv-dtype", default="int8")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--exact", default="portable", choices=("portable", "machine"))
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--sums", type=Path)
    parser.add_argument("--answers", type=Path)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    levels = [name for name in backends() if name.startswith("cpu ")]
    common = {name: getattr(options, name) for name in ("dtype", "quant", "kv_dtype", "exact")}
    load_one = partial(load, options.model, **common)
    cases = {(level, name): how for level in levels for name, how in DISTURBANCES.items()}
    if options.ranks:
        cases |= {(levels[0], name): how for name, how in RANKS.items()}
    named = (options.model.name, *common.values(), options.requests, options.new, options.vocabulary)
    sums, known = PortableSums(options.sums, str((*named, *cases))), KnownAnswers(options.answers, str(named))
    sums.load()
    begun = time.monotonic()
    seconds_before = sums.seconds
    while sums.seeds < options.seeds and time.monotonic() - begun < options.seconds:
        asked = requests(sums.seeds, options.requests, options.new, options.vocabulary)
        wanted: dict[str, list[int]] = {}
        # A level a seed computes the answers; where others are known, each level's logits are compared.
        for level in rotated(levels, sums.seeds) if options.answers else rotated(levels, sums.seeds)[:1]:
            os.environ["LLMBOX_KERNELS"] = level
            found, logits = answer_alone(load_one, asked, options.vocabulary)
            wanted = wanted or found
            if (compared := known.compare(sums.seeds, found, logits)) is not None:
                count, differ = compared
                sums.add(wanted, count + bool(differ), f"{level}, alone: {count} tokens differ {differ}")
        for (level, name), how in cases.items():
            os.environ["LLMBOX_KERNELS"] = level
            found = answer(partial(load_one, **how), name, asked, sums.seen)
            count = differing(found, wanted)
            sums.add(wanted, count, f"{level}, {name}: {count} tokens differ")
        sums.seeds += 1
        sums.seconds = seconds_before + time.monotonic() - begun
        sums.save()
    print(
        f"{sums.wrong} of {sums.compared:,} tokens differ; {sums.seeds} seeds in {sums.seconds:.0f} s; "
        + "; ".join(map(" ".join, cases))
    )
    print(", ".join(f"{count:,} {what}" for what, count in sums.seen.items()))
    return 1 if sums.wrong else 0


def rotated(levels: list[str], seed: int) -> list[str]:
    """Return the levels, beginning with another one for each seed."""
    first = seed % len(levels)
    return levels[first:] + levels[:first]


if __name__ == "__main__":
    sys.exit(main())
