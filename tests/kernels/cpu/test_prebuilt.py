"""Libraries that came along with llmbox: used where they fit and are whole, and what happens elsewhere."""

import ctypes
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmbox.kernels import dispatch as load
from llmbox.kernels.cpu import build
from llmbox.kernels.cpu import ffi as native
from llmbox.kernels.cpu.build import seal
from llmbox.kernels.cpu.ffi import DeniedInstructions
from llmbox.kernels.cpu.isa import LEVELS, Level, usable_levels
from llmbox.kernels.dispatch import select_ops

PORTABLE = LEVELS[-1]
SOURCE = 'extern "C" { int llmbox_usable() { return %d; } int llmbox_answer() { return %d; } }\n'
CAME_ALONG, COMPILED_HERE = 7, 42


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of prebuilt libraries; small ones instead of ours, which tell by a number where they come from."""
    sources, folder = tmp_path / "native", tmp_path / "prebuilt"
    sources.mkdir(), folder.mkdir()
    (sources / "library.cpp").write_text(SOURCE % (1, COMPILED_HERE))
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setattr(native, "FUNCTIONS", {"llmbox_answer": (ctypes.c_int, ())})
    monkeypatch.setenv("LLMBOX_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    load.load_backend.cache_clear()
    yield folder
    load.load_backend.cache_clear()


@pytest.fixture
def came(folder: Path, tmp_path: Path) -> Path:
    return bring(PORTABLE, tmp_path)


def bring(level: Level, tmp_path: Path, usable: int = 1) -> Path:
    """A library of today's sources by its name, with an answer of its own."""
    path = build.prebuilt_path(level)
    source = tmp_path / "came.cpp"
    source.write_text(SOURCE % (usable, CAME_ALONG))
    command = [*build.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    seal(path)
    return path


def open_portable() -> tuple[int, str]:
    library, origin = load.open_level(PORTABLE)
    return library.llmbox_answer(), origin


def test_one_that_came_along_needs_no_compiler_and_no_cache(
    came: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    came.chmod(0o444)
    came.parent.chmod(0o555)
    assert open_portable() == (CAME_ALONG, load.PREBUILT)
    assert build.native_expected()
    assert not (tmp_path / "cache").exists()
    assert [*came.parent.iterdir()] == [came]


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no library"])
def test_a_damaged_one_is_told_and_another_is_compiled(
    came: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = came.read_bytes()
    flipped = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    came.write_bytes({"cut": content[:-100], "flipped": flipped, "empty": b"", "no library": b"text"}[damage])
    if damage == "no library":
        seal(came)
    assert open_portable() == (COMPILED_HERE, load.COMPILED)
    assert str(came) in caplog.text
    assert "install llmbox again" in caplog.text


def test_one_of_other_sources_is_not_used(came: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = build.SOURCES / "library.cpp"
    source.write_text(source.read_text() + "// changed\n")
    assert open_portable() == (COMPILED_HERE, load.COMPILED)
    assert "is of other sources" in caplog.text


def test_without_one_nothing_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert open_portable() == (COMPILED_HERE, load.COMPILED)
    assert "prebuilt" not in caplog.text


@pytest.mark.parametrize("damaged", [False, True])
def test_without_one_and_without_a_compiler_torch_runs(
    came: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damaged: bool,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    came.write_bytes(b"damaged") if damaged else came.unlink()
    with caplog.at_level(logging.WARNING):
        ops = select_ops(torch.device("cpu"), torch.bfloat16)
    assert ops.name in {"onednn", "reference"}
    assert "apt install" in caplog.text
    assert ("is damaged" in caplog.text) == damaged


def test_a_better_one_than_the_cpu_can_run_is_left_alone(
    came: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(LEVELS[0], tmp_path)
    monkeypatch.setattr("llmbox.kernels.cpu.isa.cpu_flags", frozenset)
    backend = load.load_backend("cpu")
    assert (backend.name, backend.origin) == ("cpu portable", load.PREBUILT)


def test_where_only_a_lesser_one_came_along_and_nothing_compiles_it_runs(
    came: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if len(usable_levels()) < 2:
        pytest.skip("this machine runs the portable kernels alone")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    backend = load.load_backend("cpu")
    assert (backend.name, backend.origin) == ("cpu portable", load.PREBUILT)
    assert "cpu portable instead" in caplog.text


def test_where_the_system_denies_instructions_nothing_is_compiled(folder: Path, tmp_path: Path) -> None:
    bring(PORTABLE, tmp_path, usable=0)
    with pytest.raises(DeniedInstructions):
        load.open_level(PORTABLE)
    assert not (tmp_path / "cache").exists()
