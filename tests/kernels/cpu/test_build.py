"""The compiled library: kept, checked, made again, and what happens where it cannot be made."""

import ctypes
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbox.kernels import dispatch
from llmbox.kernels.cpu import build
from llmbox.kernels.cpu.ffi import open_library
from llmbox.kernels.cpu.isa import LEVELS, core_flops, cpu_flags, usable_levels
from llmbox.kernels.dispatch import UnknownBackend, load_backend, native_built, native_ready, select_ops
from support.cli_box import until

CPU = torch.device("cpu")
LEVEL = LEVELS[-1]
TINY_SOURCE = 'extern "C" int llmbox_answer() { return 42; }\n'


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library instead of ours, and a cache of its own."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "library.cpp").write_text(TINY_SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    cache = tmp_path / "cache"
    monkeypatch.setenv("LLMBOX_KERNEL_CACHE", str(cache))
    load_backend.cache_clear()
    yield cache
    load_backend.cache_clear()


def answer(path: Path) -> int:
    return ctypes.CDLL(str(path)).llmbox_answer()


def test_is_built_once(tiny: Path) -> None:
    first = build.library_path(LEVEL)
    made = first.stat().st_mtime_ns
    assert build.library_path(LEVEL) == first
    assert first.stat().st_mtime_ns == made
    assert answer(first) == 42
    assert first.stat().st_mode & 0o077 == 0
    assert tiny.stat().st_mode & 0o077 == 0


def test_what_is_built_is_known_without_building_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build.is_built(LEVEL)
    assert not list(tiny.glob("*.so"))
    build.library_path(LEVEL).touch()
    assert build.is_built(LEVEL)
    monkeypatch.setattr(dispatch, "usable_levels", lambda: (LEVEL,))
    assert native_built()
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    assert not native_built()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not build.is_built(LEVEL)


@pytest.fixture
def told() -> Iterator[list[tuple[int, int]]]:
    """How far compiles are, as whoever waits hears it."""
    heard: list[tuple[int, int]] = []
    before = build.compile_progress.set(lambda done, total: heard.append((done, total)))
    yield heard
    build.compile_progress.reset(before)


def test_a_build_tells_its_steps_and_a_library_that_is_there_none(
    tiny: Path, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (build.SOURCES / "more.cpp").write_text("int llmbox_more() { return 1; }\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    build.library_path(LEVEL)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    build.library_path(LEVEL)
    assert len(told) == 4


def test_a_wait_for_a_build_of_another_process_is_told(tiny: Path, told: list[tuple[int, int]]) -> None:
    tiny.mkdir(mode=0o700)
    with (tiny / "build.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        release = threading.Thread(target=lambda: (until(lambda: told), fcntl.flock(other, fcntl.LOCK_UN)))
        release.start()
        build.library_path(LEVEL)
        release.join()
    assert told == [(0, 0), (0, 2), (1, 2), (2, 2)]


def test_another_source_is_another_library(tiny: Path) -> None:
    first = build.library_path(LEVEL)
    (build.SOURCES / "library.cpp").write_text(TINY_SOURCE.replace("42", "43"))
    second = build.library_path(LEVEL)
    assert first != second
    assert answer(second) == 43


def test_what_a_killed_build_left_is_cleared_away(tiny: Path) -> None:
    (tiny / "unfinished-x").mkdir(parents=True, mode=0o700)
    tiny.chmod(0o700)
    (tiny / "unfinished-x" / "library.o").touch()
    (tiny / "unfinished-by-an-earlier-version.so").touch()
    made = build.library_path(LEVEL)
    assert {path.name for path in tiny.iterdir()} == {made.name, "build.lock"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_library_is_built_again(tiny: Path, damage: str) -> None:
    path = build.library_path(LEVEL)
    content = path.read_bytes()
    flipped = content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]
    path.write_bytes({"cut": content[:-100], "flipped": flipped, "empty": b""}[damage])
    assert not build.is_intact(path)
    assert answer(build.library_path(LEVEL)) == 42


@pytest.fixture
def of_the_user(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in the user's own cache, which is another one than `tiny`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("LLMBOX_KERNEL_CACHE")
    path = build.library_path(LEVEL)
    monkeypatch.setenv("LLMBOX_KERNEL_CACHE", str(tiny))
    return path


def refuse_to_compile(*_: object, **__: object) -> None:
    raise AssertionError("it is compiled again")


def test_another_data_folder_takes_the_library_of_the_user(
    tiny: Path, of_the_user: Path, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compile_library", refuse_to_compile)
    assert of_the_user.parent == tiny.parent / "xdg/llmbox/kernels"
    assert build.is_built(LEVEL)
    path = build.library_path(LEVEL)
    assert path == tiny / of_the_user.name
    assert path.read_bytes() == of_the_user.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    of_the_user.unlink()
    assert answer(build.library_path(LEVEL)) == 42
    assert told == []


@pytest.mark.parametrize("damage", ["flipped", "file for others", "folder for others"])
def test_a_library_of_the_user_that_others_could_have_written_is_compiled_again(
    tiny: Path, of_the_user: Path, told: list[tuple[int, int]], damage: str
) -> None:
    if damage == "flipped":
        content = of_the_user.read_bytes()
        of_the_user.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        (of_the_user if damage.startswith("file") else of_the_user.parent).chmod(0o777)
    assert not build.is_built(LEVEL)
    assert answer(build.library_path(LEVEL)) == 42
    assert told


BUILD = """
import ctypes, sys
from pathlib import Path
from llmbox.kernels import dispatch
from llmbox.kernels.cpu import build
from llmbox.kernels.cpu.isa import LEVELS

build.SOURCES = Path(sys.argv[1])
print(ctypes.CDLL(str(build.library_path(LEVELS[-1]))).llmbox_answer())
"""


def test_processes_that_build_at_once(tiny: Path) -> None:
    command = [sys.executable, "-P", "-c", BUILD, str(build.SOURCES)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate(timeout=300)[0] for child in children] == ["42\n"] * 3
    assert sorted(path.suffix for path in tiny.iterdir()) == [".lock", ".so"]


def test_an_engine_builds_though_it_ignores_signals(tiny: Path) -> None:
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    command = [sys.executable, "-P", "-c", ignores + BUILD, str(build.SOURCES)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=300).stdout == "42\n"


COMPILER_THAT_STARTS_ANOTHER = """#!/bin/sh
[ "$1" = --version ] && exec echo 1
sleep 1000 & echo $! > {pids}.new && mv {pids}.new {pids}
wait
"""


@pytest.fixture
def inner_compiler(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that starts another program and waits for it, as c++ does; where it writes that one's id."""
    pids, compiler = tmp_path / "pid", tmp_path / "driver"
    compiler.write_text(COMPILER_THAT_STARTS_ANOTHER.format(pids=pids))
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    return pids


def is_gone(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_compilers_end_with_the_process_that_started_them(inner_compiler: Path) -> None:
    child = subprocess.Popen([sys.executable, "-P", "-c", BUILD, str(build.SOURCES)])
    until(inner_compiler.exists)
    child.kill()
    child.wait()
    until(lambda: is_gone(int(inner_compiler.read_text())))


def test_compilers_end_by_the_timeout(inner_compiler: Path, tmp_path: Path) -> None:
    with pytest.raises(build.NativeUnavailable, match="did not finish"):
        build.compile_library(build.find_compiler(), LEVEL, tmp_path / "made.so", timeout=2)
    if inner_compiler.exists():  # else the compiler was ended before it got so far
        until(lambda: is_gone(int(inner_compiler.read_text())))


def test_compilers_end_by_an_interrupt(
    inner_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("concurrent.futures.as_completed", lambda _work: interrupt_once_begun(inner_compiler))
    with pytest.raises(KeyboardInterrupt):
        build.compile_library(build.find_compiler(), LEVEL, tmp_path / "made.so")
    until(lambda: is_gone(int(inner_compiler.read_text())))


def interrupt_once_begun(pids: Path) -> Iterator[Any]:
    until(pids.exists)
    raise KeyboardInterrupt
    yield


def test_a_source_that_does_not_compile_names_the_error(tiny: Path) -> None:
    (build.SOURCES / "library.cpp").write_text("int x = ;\n")
    with pytest.raises(build.NativeUnavailable, match=r"cannot compile .*expected"):
        build.library_path(LEVEL)
    assert [path.suffix for path in tiny.iterdir()] == [".lock"]


@pytest.mark.parametrize("trouble", ["no compiler", "compiler fails", "no folder at all", "open cache"])
def test_without_a_library_torch_runs_and_the_log_says_why(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    match trouble:
        case "no compiler":
            monkeypatch.setenv("PATH", str(tmp_path))
            expected = "apt install"
        case "compiler fails":
            monkeypatch.setenv("CXX", "false")
            expected = "false does not run"
        case "no folder at all":
            tiny.write_text("a file where the folder should be")
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(tiny))
            expected = f"nor can {tiny}"
        case "open cache":
            tiny.mkdir()
            tiny.chmod(0o777)
            expected = "chmod 700"
    monkeypatch.delenv("CXX", raising=False) if trouble != "compiler fails" else None
    with caplog.at_level(logging.WARNING):
        ops = select_ops(CPU, torch.bfloat16)
    assert ops.name in {"onednn", "reference"}
    assert expected in caplog.text
    assert expected in ops.problem
    assert not native_ready()


def test_a_cache_that_cannot_be_written_gives_way_to_a_temporary_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        path = build.library_path(LEVEL)
    assert path.parent.parent == tmp_path
    assert path.parent.stat().st_mode & 0o077 == 0
    assert str(path.parent) in caplog.text
    assert answer(path) == 42
    made = path.stat().st_mtime_ns
    assert build.library_path(LEVEL).stat().st_mtime_ns == made


def test_a_full_disk_gives_way_to_a_temporary_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not to the next instruction set, which would be compiled in vain as well."""
    compiler = tmp_path / "compiler"
    full = f"case $* in *{tiny}*) echo 'ld: cannot write: No space left on device' >&2; exit 1;; esac"
    compiler.write_text(f'#!/bin/sh\n{full}\nexec {build.find_compiler()[0]} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert build.library_path(LEVEL).parent == build.temporary_folder()
    assert "No space left" in caplog.text


def test_a_temporary_folder_of_somebody_else_is_not_trusted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    theirs = build.temporary_folder()
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(build.NativeUnavailable, match="can be written by others"):
        build.library_path(LEVEL)


def test_asking_for_kernels_that_cannot_run_is_an_error(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnknownBackend, match="no-such-compiler"):
        select_ops(CPU, torch.float32)


def test_levels_follow_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llmbox.kernels.cpu.isa.cpu_flags", lambda: frozenset({"avx2", "fma", "f16c", "bmi2"})
    )
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [level.name for level in usable_levels()] == ["avx2", "portable"]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [level.name for level in usable_levels()] == ["portable"]


@pytest.mark.parametrize(
    ("features", "levels"),
    [
        ("fp asimd evtstrm aes crc32 cpuid", ["portable"]),
        ("fp asimd crc32 atomics asimdrdm asimddp", ["dotprod", "portable"]),
        ("fp asimd crc32 atomics asimdrdm asimddp i8mm bf16", ["i8mm", "dotprod", "portable"]),
    ],
)
def test_levels_of_arm_follow_hwcap(
    features: str, levels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {features}\n")
    monkeypatch.setattr("llmbox.kernels.cpu.isa.Path", lambda _path: cpuinfo)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpu_flags.cache_clear()
    try:
        assert [level.name for level in usable_levels()] == levels
    finally:
        cpu_flags.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "family", "times"),
    [("AuthenticAMD", 25, 1), ("AuthenticAMD", 26, 4), ("GenuineIntel", 26, 1), ("", "", 1)],
)
def test_wide_cores_are_known_by_their_family(
    vendor: str, family: object, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu\n")
    monkeypatch.setattr("llmbox.kernels.cpu.isa.Path", lambda _path: cpuinfo)
    monkeypatch.setattr("llmbox.kernels.cpu.isa.usable_levels", lambda: (LEVELS[1],))
    assert core_flops.__wrapped__() == times * LEVELS[1].flops


@pytest.mark.parametrize(
    ("intel", "flags", "best"),
    [
        (False, "avx512_vnni avx512_bf16", ["avx512-bf16", "avx512-vnni", "avx512"]),
        (True, "avx512_vnni avx512_bf16", ["avx512-vnni", "avx512-bf16", "avx512"]),
        (True, "avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8", ["amx", "avx512-vnni", "avx512-bf16"]),
        (True, "avx512_vnni", ["avx512-vnni", "avx512", "avx2"]),
        (True, "", ["avx512", "avx2", "portable"]),
    ],
)
def test_levels_of_avx512_follow_flags_and_vendor(
    intel: bool, flags: str, best: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    avx512 = "avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl avx512cd"
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("llmbox.kernels.cpu.isa.is_intel", lambda: intel)
    monkeypatch.setattr("llmbox.kernels.cpu.isa.cpu_flags", lambda: frozenset(f"{avx512} {flags}".split()))
    assert [level.name for level in usable_levels()][:3] == best


def test_the_best_level_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    ops = select_ops(CPU, torch.float32)
    assert (ops.name, ops.problem) == (f"cpu {usable_levels()[0].name} (compiled here)", "")
    assert os.name != "posix" or cpu_flags() or usable_levels()[0].name == "portable"


def test_a_level_that_the_system_denies_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = []

    def open_first_never(path: Path) -> ctypes.CDLL:
        opened.append(path)
        if len(opened) == 1:
            raise build.NativeUnavailable("denied")
        return open_library(path)

    if len(usable_levels()) < 2:
        pytest.skip("this machine runs the portable kernels alone")
    levels = usable_levels()[0], usable_levels()[-1]  # those between need not be compiled for this
    monkeypatch.setattr("llmbox.kernels.dispatch.usable_levels", lambda: levels)
    monkeypatch.setattr("llmbox.kernels.dispatch.open_library", open_first_never)
    load_backend.cache_clear()
    try:
        assert load_backend("cpu").name == f"cpu {levels[1].name}"
        assert f"no kernels for cpu {usable_levels()[0].name}" in caplog.text
        monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
        assert select_ops(CPU, torch.float32).problem == "denied"
    finally:
        load_backend.cache_clear()


@pytest.mark.parametrize("cores", [1, 2, 3, 100])
def test_every_source_is_in_one_part_whatever_the_cores(cores: int) -> None:
    parts = build.split_sources(cores)
    sources = sorted(build.SOURCES.rglob("*.cpp"))
    assert sorted(source for part in parts for source in part) == sources
    assert len(parts) == min(cores, len(sources))
    work = [sum(build.SECONDS.get(source.stem, 1.0) for source in part) for part in parts]
    assert max(work) <= max(sum(work) / len(parts) * 1.25, *build.SECONDS.values())


def test_all_sources_can_be_one_part(tmp_path: Path) -> None:
    """A machine with one core compiles them so."""
    whole = tmp_path / "whole.cpp"
    (part,) = build.split_sources(1)
    whole.write_text("".join(f'#include "{source}"\n' for source in part))
    include = ["-I", str(build.SOURCES)]
    command = [*build.find_compiler(), *build.FLAGS, *include, "-fsyntax-only", str(whole)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""
