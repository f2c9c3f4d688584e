"""`make mutate`: plant the mistakes of `mutations.toml` one at a time; the simulator or a test must notice.

    python -P -m simulate.mutate [--seeds 60] [--only TEXT] [--processes 2] [--afresh] [--write]

Each mistake goes into a copy of the tree. What caught it last (`killers.json`) runs first; where that does
not catch it, seeds of the simulator, then the unit tests of the mistake's file, each with a limit of time.
Checks are forked from a process that has imported other people's packages, and modules of the copy are
compiled once: most of a check's time would go there.
Prints what caught each mistake, and those that nothing caught; the exit code is 1 if fewer than 95 % are
caught. `--afresh` forgets what caught them before. `--write` puts the result into docs/reliability.md.
"""

import argparse
import atexit
import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

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
    "tests/app/control",
    "tests/app/engines",
    "tests/app/lifecycle",
    "tests/app/http/server",
)
LINKED = ("kernels", "ui", "migrations", "pyproject.toml", "tests/conftest.py")
SHARE = 0.95
"""Least part of the mistakes that must be caught."""
_PROCESSOR_S = 60
"""Most processor seconds of unit tests, several times what they take: a mistake that runs on is caught."""
_START_S, _SEED_S = 10, 1
"""The same for seeds: to begin with, and for each."""
_WAIT_S = 1800
"""Most seconds of one check that waits for ever."""
_PRELOADED = ("greenlet", "httpx", "hypothesis", "litestar", "msgspec", "numpy", "pytest", "sqlmodel")
_NOTHING_RAN = (4, 5)
"""Exit codes of pytest for a test that is not there any more."""
_OURS = re.compile(r"(llmbox|support|simulate|tests|conftest)($|\.)")
_clock = itertools.count(1_000_000_000)
"""Times of the files with mistakes: byte code of another one must not be taken for theirs."""
_SHARES = ("engine/core/test_fair_shares", "engine/core/test_scheduler", "engine/core/test_liveness")
_STORED = ("simulate/test_stored_responses",)
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
    "app/http/server/sse.py": ("app/http/server/test_sse",),
    "app/engines/manager.py": ("app/engines/test_manager", "app/control/test_model_scheduler"),
    "app/control/model_scheduler.py": ("app/control/test_model_scheduler",),
    "app/lifecycle/drain.py": ("app/lifecycle/test_background_tasks", *_STORED),
    "app/http/openai_responses/stored.py": _STORED,
    "app/http/openai_responses/translate.py": _STORED,
    "app/http/openai_responses/writer.py": _STORED,
    "app/store/queries/stored_answers.py": _STORED,
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
    _write(file, text.replace(mutation.old, mutation.new))
    try:
        if killer.startswith("seed ") and _run_seeds(tree, int(killer.split()[1]), 1):
            return killer
        if killer.startswith("tests/") and _run_tests(tree, killer):
            return killer
        if seeds and (found := _run_seeds(tree, 0, seeds)) is not None:
            return found
        files = [f"tests/{name}.py" for name in UNIT_TESTS.get(mutation.file, ())]
        return (_run_tests(tree, *files) or "") if tests and files else ""
    finally:
        _write(file, text)


def _write(file: Path, text: str) -> None:
    file.write_text(text, "utf-8")
    now = next(_clock)
    os.utime(file, (now, now))


def _run_seeds(tree: Path, first: int, count: int) -> str | None:
    """Return the seed that breaks the rule; None if none does."""
    arguments = ("--first", str(first), "--seeds", str(count))
    output = _output_of_failure(tree, _START_S + _SEED_S * count, "simulate.run", *arguments)
    if output is None:
        return None
    found = re.search(r"^seed (\d+) ", output, re.MULTILINE)
    return f"seed {found[1] if found else first}"


def _run_tests(tree: Path, *tests: str) -> str | None:
    """Return the test that fails; None if none does."""
    options = ("-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist")
    output = _output_of_failure(tree, _PROCESSOR_S, "pytest", *options, *tests)
    if output is None:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", output, re.MULTILINE)
    return found[1] if found else tests[0]


def _output_of_failure(tree: Path, most_s: int, module: str, *arguments: str) -> str | None:
    """Run a module of the copy in a process of its own. Returns what it printed if it failed or took more
    processor seconds, else None. The caller has no module of the tree with state of its own in memory.
    """
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            _run_forked(tree, most_s, output.fileno(), module, arguments)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        has_failed = os.waitstatus_to_exitcode(status) not in {0, *_NOTHING_RAN}
        return output.read().decode(errors="replace") if has_failed else None


def _run_forked(tree: Path, most_s: int, output: int, module: str, arguments: tuple[str, ...]) -> None:
    """Become `python -m module` in a copy of the tree. Never returns."""
    code = 1
    try:
        # Processor time, since that of a clock would depend on what else the machine does.
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
        signal.alarm(_WAIT_S)
        atexit._clear()
        for number in (1, 2):
            os.dup2(output, number)
        sys.stdout = sys.stderr = os.fdopen(os.dup(output), "w", buffering=1)
        os.environ["LLMBOX_TEST_PROFILE"] = "mutate"
        os.chdir(tree)
        sys.path[:0] = [str(tree / "packaging/tree"), str(tree / "tests")]
        for name in [name for name in sys.modules if _OURS.match(name)]:
            del sys.modules[name]
        importlib.invalidate_caches()
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            atexit._run_exitfuncs()
        os._exit(code & 0xFF)


class MutationWorker:
    """Process of the pool: has a copy of the tree, and checks one mistake at a time."""

    tree = Path()

    @classmethod
    def begin(cls, home: str) -> None:
        cls.tree = Path(home) / str(os.getpid())
        make_copy(cls.tree)
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in _PRELOADED:
            importlib.import_module(name)

    @classmethod
    def work(cls, order: tuple[Mutation, int, str]) -> tuple[Mutation, str, float]:
        """Return the mistake, what caught it, and the processor seconds of its checks."""
        mutation, seeds, killer = order
        found = check(cls.tree, mutation, seeds, killer=killer)
        return mutation, found, _used()


def _used() -> float:
    """Processor seconds of the checks since the last call."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    total, before = usage.ru_utime + usage.ru_stime, _used_before[0]
    _used_before[0] = total
    return total - before


_used_before = [0.0]


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
    caught: dict[str, str] = {}
    used = 0.0
    orders = [(each, options.seeds, known.get(each.why, "")) for each in wanted]
    pools = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="llmbox-mutate-") as home,
        pools.Pool(options.processes, MutationWorker.begin, (home,)) as pool,
    ):
        for mutation, found, seconds in pool.imap_unordered(MutationWorker.work, orders):
            used += seconds
            print(f"{found or 'NOT CAUGHT':10}  {seconds:.1f} s  {mutation.file}: {mutation.why}", flush=True)
            caught[mutation.why] = found
            if found:
                known[mutation.why] = found
                keep_killers(known)
    seconds = f"{time.monotonic() - began:.0f} s with {options.processes} processes"
    seconds += f", {used:.0f} s of a processor"
    return report(wanted, [caught[each.why] for each in wanted], seconds, options)


def keep_killers(known: dict[str, str]) -> None:
    names = {each.why for each in read_mutations()}
    kept = {why: by for why, by in sorted(known.items()) if why in names}
    KILLERS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def report(wanted: list[Mutation], found: list[str], seconds: str, options: argparse.Namespace) -> int:
    caught = Counter(by.split()[0] if by.startswith("seed") else "test" if by else "" for by in found)
    survivors = [f"{each.file}: {each.why}" for each, by in zip(wanted, found, strict=True) if not by]
    count = len(wanted) - len(survivors)
    share = f"{count} of {len(wanted)} mistakes caught ({100 * count / max(1, len(wanted)):.1f} %)"
    by = f"{caught['seed']} by {options.seeds} seeds, {caught['test']} by unit tests"
    lines = [
        f"{share}: {by}",
        seconds,
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
