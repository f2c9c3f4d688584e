"""Sums are one tree in any company: the kernels run over numbers that know how they were computed."""

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from llmbox.kernels.cpu import compiling
from support.lanes import first_in_the_suite

DRIVER = Path(__file__).parent / "traced.cpp"
FLAGS = ("-std=c++20", "-O0", "-pthread", "-ffp-contract=off", "-w", "-Wno-psabi")
LANES = (16, 8, 4)
"""Floats of a vector: of AVX-512, of AVX2, of Arm and the portable kernels."""
FEW, ALL = 0, 256
"""Numbers of rows and cuts of prompts: some at which tiles and blocks change, or all up to 256."""

Digests = Callable[[int, int], list[str]]


def run(lanes: int, rows: int, folder: Path, sources: Path = compiling.SOURCES) -> tuple[int, list[str]]:
    """Compile and run the driver: its exit status and its lines."""
    program = folder / f"traced{lanes}"
    if not program.exists():
        places = ("-I", str(sources), f"-DLLMBOX_TRACED={lanes}", str(DRIVER), "-o", str(program))
        made = subprocess.run([*compiling.find_compiler(), *FLAGS, *places], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr[-2000:]
    done = subprocess.run([program, str(rows)], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Return a function: the digests of all cases with so many lanes, none of which may find two trees."""
    folder = tmp_path_factory.mktemp("traced")

    @cache
    def found(lanes: int, rows: int) -> list[str]:
        code, lines = run(lanes, rows, folder)
        assert (code, lines[-1]) == (0, "one tree each")
        return lines[:-1]

    return found


@pytest.mark.slow
@pytest.mark.parametrize("lanes", first_in_the_suite(LANES))
def test_sums_are_one_tree_in_any_company(digests: Digests, lanes: int) -> None:
    """Linears, norms, activations, attention, scans; numbers of rows, tiles, threads, pieces of prompts."""
    assert len(digests(lanes, FEW)) > 35


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("lanes", LANES)
def test_sums_are_one_tree_among_up_to_256_rows(digests: Digests, lanes: int) -> None:
    assert digests(lanes, ALL) == digests(LANES[0], FEW)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "kept", "broken"),
    [
        # Chunks that begin where a window does, and sums over as many numbers as there are lanes.
        ("attention/attention.h", "strip_of(step, seen) / STRIPS * STRIPS", "strip_of(step, seen)"),
        ("vector/simd.h", "constexpr int SUM_LANES = 16", "constexpr int SUM_LANES = LANES"),
    ],
)
def test_another_order_is_found(tmp_path: Path, digests: Digests, file: str, kept: str, broken: str) -> None:
    sources = tmp_path / "native"
    shutil.copytree(compiling.SOURCES, sources)
    text = (sources / file).read_text()
    assert text.count(kept) == 1
    (sources / file).write_text(text.replace(kept, broken))
    code, lines = run(8, FEW, tmp_path, sources)
    assert code == 1 or lines[:-1] != digests(LANES[0], FEW)
