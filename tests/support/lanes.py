"""Lanes of the suite: what `make nightly` draws beyond `make test`, and what `make test-fast` leaves out."""

import ast
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

TESTS = Path(__file__).parents[1]
NIGHTLY = os.environ.get("LLMBOX_TEST_PROFILE") == "nightly"
FAST = os.environ.get("LLMBOX_TEST_LANE") == "fast"
HEAVY = {
    "starts processes": (
        "subprocess", "multiprocessing", "playwright", "pty", "llmbox.engine.ipc.spawn", "llmbox.app.sandbox",
    ),
    "runs whole engines": (
        "llmbox.engine.executor.build", "llmbox.engine.executor.rank_engine",
        "llmbox.engine.quantize.quantize", "transformers",
    ),
    "runs Triton's interpreter": ("triton", "llmbox.kernels.triton", "support.triton_interpreter"),
}  # fmt: skip
"""Files that `make test-fast` leaves out import one of these, or a helper or a conftest.py that does."""
OUTSIDE = (
    "bench", "clients", "e2e", "faults", "fuzz", "gpu", "installed", "kernels", "simulate", "soak", "ui",
)  # fmt: skip
"""Folders of other lanes, of kernels (a compiler may have to run first) and of screens."""


def examples(most: int) -> int:
    """Number of examples of a property test: `most` each night; a quarter, always the same, in the suite."""
    return most if NIGHTLY else max(10, most // 4)


def why_not_fast(file: Path) -> str:
    """Why `make test-fast` leaves a test file out; empty where it does not."""
    folder = file.parent.relative_to(TESTS)
    if any(folder.is_relative_to(outside) for outside in OUTSIDE):
        return "belongs to another lane"
    if "pytestmark = pytest.mark.slow" in file.read_text():
        return "is slow"
    files = [file, *(TESTS / parent / "conftest.py" for parent in (folder, *folder.parents[:-1]))]
    return next((why for each in files if each.is_file() and (why := heavy_import(each))), "")


def nightly(*values: object) -> Any:
    """Parameters of a test that only `make nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def slow(values: Iterable[object]) -> list[Any]:
    """Parameters of a test that `make test-fast` leaves out."""
    return [pytest.param(each, marks=pytest.mark.slow) for each in values]


def first_in_the_suite(values: Sequence[T]) -> list[Any]:
    """Parameters of a test: the first of `values` in the suite, the others each night."""
    return [nightly(each) if number else each for number, each in enumerate(values)]


def every_pair(*axes: Sequence[Any]) -> list[Any]:
    """Parameters of a test, the product of `axes`. The suite takes so few of them that any two values of two
    axes still meet; the others run each night.
    """
    left = [tuple(enumerate(places)) for places in product(*(range(len(axis)) for axis in axes))]
    every = list(left)
    taken: set[tuple[tuple[int, int], ...]] = set()
    met: set[tuple[tuple[int, int], ...]] = set()
    news = lambda places: len(set(combinations(places, 2)) - met)  # noqa: E731
    while left and news(best := max(left, key=news)):
        taken.add(best)
        met.update(combinations(best, 2))
        left.remove(best)
    values = [[axes[axis][place] for axis, place in places] for places in every]
    return [pytest.param(*v) if p in taken else nightly(*v) for p, v in zip(every, values, strict=True)]


@cache
def heavy_import(file: Path) -> str:
    """The kind in `HEAVY` of what the file imports, by itself or by its helpers; empty without one."""
    names = imported(file)
    for why, heavy in HEAVY.items():
        if any(name == each or name.startswith(each + ".") for name in names for each in heavy):
            return why
    helpers = {TESTS / (name.replace(".", "/") + ".py") for name in names if name.startswith("support.")}
    return next((why for each in sorted(helpers) if each.is_file() and (why := heavy_import(each))), "")


@cache
def imported(file: Path) -> frozenset[str]:
    """Names of all modules that a file imports, anywhere in it; `from a import b` gives `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


class ProcessGuard:
    """Audit hook: while it is armed, a test that starts a process fails."""

    EVENTS = frozenset(
        {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
    )

    def __init__(self) -> None:
        self.armed = False

    def install(self) -> None:
        """For the rest of this process: Python has no way to take an audit hook away."""
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if self.armed and event in self.EVENTS:
            raise RuntimeError(f"a test of `make test-fast` starts a process ({args[:1]}): mark it `process`")
