"""`make mutate`: plant the mistakes of `mutations.toml` one at a time; the simulator or a test must notice.

    python -P -m simulate.mutate [--seeds 60] [--only TEXT] [--processes 2] [--afresh] [--write]

Each mistake goes into a copy of the tree. What caught it last (`killers.json`) runs first; where that does
not catch it, seeds of the simulator, then the unit tests of the mistake's file, each with a limit of time.
Prints what caught each mistake, and those that nothing caught; the exit code is 1 if fewer than 95 % are
caught. `--afresh` forgets what caught them before. `--write` puts the result into docs/reliability.md.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from support.results import renew

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.toml")
KILLERS = Path(__file__).with_name("killers.json")
"""What caught each mistake last, by its reason: a seed, or a test. It may be out of date: then all is run."""
COPIED = (
    "app",
    "engine",
    "packaging/tree",
    "tests/support",
    "tests/simulate",
    "tests/engine/core",
    "tests/app/engines",
)
LINKED = ("kernels", "ui", "migrations", "pyproject.toml", "tests/conftest.py")
SHARE = 0.95
"""Least part of the mistakes that must be caught."""
_PROCESSOR_S = 90
"""Most processor seconds of one check, several times what it takes: a mistake that runs on is caught."""
_WAIT_S = 1800.0
"""Most seconds of one check that waits for ever."""
_SHARES = ("engine/core/test_fair_shares", "engine/core/test_scheduler", "engine/core/test_liveness")
_BLOCKS = ("engine/core/kv_cache/test_block_pool", "engine/core/kv_cache/test_prefix_history")
UNIT_TESTS = {
    "engine/core/scheduler.py": (*_SHARES, "engine/core/test_engine"),
    "engine/core/request_queue.py": _SHARES,
    "engine/core/preemption.py": ("engine/core/test_preemption", *_SHARES),
    "engine/core/kv_cache/block_pool.py": (*_BLOCKS, "engine/core/test_scheduler"),
    "engine/core/kv_cache/prefix_cache.py": (*_BLOCKS, "engine/core/test_scheduler"),
    "engine/core/kv_cache/manager.py": ("engine/core/test_scheduler", "engine/core/test_liveness"),
    "engine/core/engine.py": ("engine/core/test_overlapped_steps", "engine/core/test_scheduler_machine"),
    "app/engines/request_journal.py": ("app/engines/test_poison_detector", "app/engines/test_supervisor"),
    "app/engines/poison_detector.py": ("app/engines/test_poison_detector",),
    "app/engines/supervisor.py": (
        "simulate/test_simulate",
        "app/engines/test_reservation",
        "app/engines/test_cooldown",
    ),
    "app/engines/restart_policy.py": ("app/engines/test_restart_policy", "app/engines/test_watchdog"),
    "app/engines/admission.py": ("app/engines/test_reservation",),
    "app/engines/engine_process.py": ("simulate/test_simulate", "app/engines/test_engine_process"),
    "app/engines/manager.py": ("app/engines/test_manager",),
}
"""Unit tests of a file with mistakes, below `tests`; the simulator alone looks for those in other files."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake: a text of a file and what stands there instead."""

    file: str
    old: str
    new: str
    why: str


def read_mutations() -> list[Mutation]:
    return [Mutation(**each) for each in tomllib.loads(LIST.read_text("utf-8"))["mutation"]]


def make_copy(into: Path) -> None:
    for name in COPIED:
        shutil.copytree(ROOT / name, into / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LINKED:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        (into / name).symlink_to(ROOT / name)


def check(tree: Path, mutation: Mutation, seeds: int, *, killer: str = "", tests: bool = True) -> str:
    """Return what caught the mistake: a `seed` with its number, a test, or nothing. `killer`: what is tried
    first. Unit tests run only with `tests`.
    """
    file = tree / mutation.file
    text = file.read_text("utf-8")
    assert text.count(mutation.old) == 1, mutation
    file.write_text(text.replace(mutation.old, mutation.new), "utf-8")
    try:
        if killer.startswith("seed ") and _run_seeds(tree, int(killer.split()[1]), 1):
            return killer
        if killer.startswith("tests/") and _run_tests(tree, killer):
            return killer
        if (found := _run_seeds(tree, 0, seeds)) is not None:
            return found
        files = [f"tests/{name}.py" for name in UNIT_TESTS.get(mutation.file, ())]
        return (_run_tests(tree, *files) or "") if tests and files else ""
    finally:
        file.write_text(text, "utf-8")


def _run_seeds(tree: Path, first: int, count: int) -> str | None:
    """Return the seed that breaks the rule; None if none does."""
    output = _output_of_failure(tree, "simulate.run", "--first", str(first), "--seeds", str(count))
    if output is None:
        return None
    found = re.search(r"^seed (\d+) ", output, re.MULTILINE)
    return f"seed {found[1] if found else first}"


def _run_tests(tree: Path, *tests: str) -> str | None:
    """Return the test that fails; None if none does."""
    options = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist")
    output = _output_of_failure(tree, "pytest", *options, *tests)
    if output is None:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/\S+)", output, re.MULTILINE)
    return found[1] if found else tests[0]


def _output_of_failure(tree: Path, *arguments: str) -> str | None:
    """Run a module. Returns what it printed if it failed or took too long, else None."""
    env = os.environ | {
        "PYTHONPATH": f"{tree / 'packaging/tree'}:{tree / 'tests'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            preexec_fn=_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode else None


def _limit() -> None:
    """Limit processor time: that of a clock would depend on what else the machine does."""
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=80, help="seeds of the simulator for each mistake")
    parser.add_argument("--only", default="", help="expression to find in a mistake's file and reason")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--afresh", action="store_true", help="forget what caught each before")
    parser.add_argument("--write", action="store_true", help="put the result into docs/reliability.md")
    options = parser.parse_args()
    wanted = [each for each in read_mutations() if re.search(options.only, f"{each.file}: {each.why}")]
    known: dict[str, str] = {}
    if not options.afresh and KILLERS.exists():
        known = json.loads(KILLERS.read_text("utf-8"))
    began = time.monotonic()
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="llmbox-mutate-") as home:
        for number in range(options.processes):
            trees.put(Path(home) / str(number))
            make_copy(Path(home) / str(number))

        def work(mutation: Mutation) -> str:
            tree = trees.get()
            try:
                found = check(tree, mutation, options.seeds, killer=known.get(mutation.why, ""))
            finally:
                trees.put(tree)
            print(f"{found or 'NOT CAUGHT':10}  {mutation.file}: {mutation.why}", flush=True)
            if found:
                known[mutation.why] = found
            return found

        with ThreadPoolExecutor(options.processes) as pool:
            found = list(pool.map(work, wanted))
    names = {each.why for each in read_mutations()}
    kept = {why: by for why, by in sorted(known.items()) if why in names}
    KILLERS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return report(wanted, found, time.monotonic() - began, options)


def report(wanted: list[Mutation], found: list[str], seconds: float, options: argparse.Namespace) -> int:
    caught = Counter(by.split()[0] if by.startswith("seed") else "test" if by else "" for by in found)
    survivors = [f"{each.file}: {each.why}" for each, by in zip(wanted, found, strict=True) if not by]
    count = len(wanted) - len(survivors)
    share = f"{count} of {len(wanted)} mistakes caught ({100 * count / max(1, len(wanted)):.1f} %)"
    by = f"{caught['seed']} by {options.seeds} seeds, {caught['test']} by unit tests"
    lines = [
        f"{share}: {by}",
        f"{seconds:.0f} s with {options.processes} processes",
        *(f"not caught: {each}" for each in survivors),
    ]
    print("\n".join(lines))
    if options.write:
        command = f"python -P -m simulate.mutate --seeds {options.seeds} --processes {options.processes}"
        head = f"{time.strftime('%Y-%m-%d', time.gmtime())}, {platform.machine()}: `{command}`"
        renew("mutate", "\n".join([head, "", "```text", *lines, "```"]))
    return 0 if count >= SHARE * len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
