"""Doctor says which library the CPU kernels run from, and what is wrong with one that came along."""

from pathlib import Path

import pytest

from llmbox.app.diagnostics.checks import Finding, check_kernels
from llmbox.app.lifecycle.program import Program
from llmbox.kernels.cpu import build
from llmbox.kernels.cpu.build import seal
from llmbox.kernels.cpu.isa import KERNEL_CACHE, usable_levels
from llmbox.kernels.support import BEST_CPU, TRITON, known_kernels
from support.kernel_backends import backends

BEST, LEAST = usable_levels()[0], usable_levels()[-1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of prebuilt libraries; the cache is empty."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))  # where they go without a cache
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    return tmp_path


def bring(level):
    path = build.prebuilt_path(level)
    path.write_bytes(b"code")
    seal(path)
    return path


def told() -> list[Finding]:
    return list(check_kernels(Program({})))


def test_one_that_came_along(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    path = bring(BEST)
    assert told() == [Finding("kernels", "ok", f"C++ for {BEST.name}, prebuilt: {path}")]


@pytest.mark.parametrize("damaged", [True, False])
def test_one_that_came_along_and_cannot_be_used(folder, monkeypatch, damaged):
    bring(BEST).write_bytes(b"damaged") if damaged else bring(BEST).rename(
        folder / f"{BEST.name}-{'0' * 20}.so"
    )
    first, second = told()
    assert (first.status, first.fix) == ("note", "install llmbox again")
    assert ("is damaged" if damaged else "is of other sources") in first.message
    assert second.message == f"C++ for {BEST.name}, to be compiled when a model is first loaded"


def test_one_compiled_here_and_of_another_level_not(folder):
    cache = folder / "cache"
    cache.mkdir()
    for name in (f"{BEST.name}-more", BEST.name):
        path = cache / f"{name}-{'0' * build.DIGITS}.so"
        path.write_bytes(b"code")
        seal(path)
        path.chmod(0o700)
        (found,) = told()
        assert found.message.endswith(f"compiled in {cache}") == (name == BEST.name)


def test_without_a_compiler(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (found,) = told()
    assert (found.status, found.fix) == ("note", "apt install g++")
    assert found.message.endswith("PyTorch's slower kernels run on the CPU")
    if LEAST != BEST:
        bring(LEAST)
        (found,) = told()
        assert found.message.endswith(f"the prebuilt C++ kernels for {LEAST.name} run on the CPU")


def test_kernels_that_nobody_knows_are_said_once_with_those_there_are(folder, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "fast")
    (finding,) = told()
    assert (finding.status, finding.message) == ("failed", "LLMBOX_KERNELS asks for 'fast': not known here")
    assert finding.fix == f"unset LLMBOX_KERNELS, or set it to one of: {', '.join(known_kernels())}"
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    assert told() == [Finding("kernels", "note", "LLMBOX_KERNELS asks for 'reference'")]


def test_names_are_those_that_the_engine_takes():
    assert set(known_kernels()) - {BEST_CPU, TRITON} == set(backends()) - {TRITON}
