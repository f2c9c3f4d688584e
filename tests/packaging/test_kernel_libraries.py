"""Which libraries a wheel carries, what it is called for that, and what is told of those it lacks."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "packaging" / "kernel_libraries.py"
NOT_WITH_AVX2 = "#ifdef __AVX2__\n#error no such thing\n#endif\n"


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with small sources instead of ours."""
    spec = importlib.util.spec_from_file_location("kernel_libraries", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "library.cpp").write_text("#include <vector>\nstd::vector<int> llmbox_numbers(3);\n")
    monkeypatch.setattr(script.module("build"), "SOURCES", sources)
    monkeypatch.delenv(script.CHOICE, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    yield script
    for name in [name for name in sys.modules if name.startswith("llmbox_cpu_kernels")]:
        del sys.modules[name]


def levels(paths: list[Path]) -> list[str]:
    return [path.stem.rpartition("-")[0] for path in paths]


@pytest.mark.process
def test_one_for_each_instruction_set_whole_and_by_the_name_that_is_looked_for(libraries, tmp_path):
    made, problems = libraries.build_libraries(tmp_path)
    assert problems == []
    assert levels(made) == ["amx", "avx512-bf16", "avx512-vnni", "avx512", "avx-vnni", "avx2", "portable"]
    known = libraries.wanted_levels()
    assert [path.name for path in made] == [
        libraries.module("build").prebuilt_path(level).name for level in known
    ]
    assert all(libraries.module("build").is_sealed(path) for path in made)
    assert b"libstdc++.so" not in b"".join(path.read_bytes() for path in made)
    assert sorted(path for path in tmp_path.iterdir() if path.name != "native") == sorted(made)


@pytest.mark.process
def test_what_the_compiler_does_not_know_is_left_out_and_told(libraries, tmp_path, monkeypatch):
    source = libraries.module("build").SOURCES / "library.cpp"
    source.write_text(NOT_WITH_AVX2 + source.read_text())
    monkeypatch.setenv(libraries.CHOICE, "avx2 portable")
    made, problems = libraries.build_libraries(tmp_path)
    assert levels(made) == ["portable"]
    assert len(problems) == 1
    assert "no CPU kernels for avx2" in problems[0]
    assert "no such thing" in problems[0]


@pytest.mark.process
def test_a_cross_compiler_makes_the_levels_of_another_machine(libraries, tmp_path, monkeypatch):
    compiler = "aarch64-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip("needs a cross compiler: apt install g++-aarch64-linux-gnu")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv(libraries.MACHINE, "aarch64")
    made, problems = libraries.build_libraries(tmp_path)
    assert problems == []
    assert levels(made) == ["i8mm", "dotprod", "portable"]
    machines = {path.read_bytes()[18:20] for path in made}  # e_machine of the ELF header
    assert machines == {b"\xb7\x00"}
    assert re.fullmatch(r"py3-none-manylinux_2_\d+_aarch64", libraries.wheel_tag(made))


@pytest.mark.process
def test_a_compiler_has_the_time_that_the_build_allows(libraries, tmp_path, monkeypatch):
    slow = tmp_path / "slow-compiler"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv(libraries.CHOICE, "portable")
    monkeypatch.setenv(libraries.TIMEOUT, "1")
    made, (problem,) = libraries.build_libraries(tmp_path)
    assert made == []
    assert "did not finish the kernels for portable in 1 s" in problem
    monkeypatch.delenv(libraries.TIMEOUT)
    assert libraries.compile_timeout() == 3600
    monkeypatch.setenv(libraries.TIMEOUT, "soon")
    with pytest.raises(SystemExit, match="'soon' is no number of seconds"):
        libraries.compile_timeout()


def test_without_a_compiler_there_are_none_and_that_is_told(libraries, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    made, problems = libraries.build_libraries(tmp_path)
    assert made == []
    assert "no C++ compiler found (CXX=no-such-compiler)" in problems[0]
    assert "compiled at the first start" in problems[0]


def test_none_are_made_where_none_are_wanted(libraries, tmp_path, monkeypatch):
    monkeypatch.setenv(libraries.CHOICE, "none")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert libraries.build_libraries(tmp_path) == ([], [])


def test_an_unknown_instruction_set_ends_the_build_with_the_names_there_are(libraries, monkeypatch):
    monkeypatch.setenv(libraries.CHOICE, "avx2 avx1024")
    with pytest.raises(SystemExit, match=r"unknown avx1024; use all, none, or some of amx .*portable"):
        libraries.wanted_levels()


@pytest.mark.parametrize(
    ("content", "tag"),
    [
        (b"..GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.4\0", "py3-none-manylinux_2_34_x86_64"),
        (b"nothing is said", "py3-none-linux_x86_64"),
    ],
)
def test_the_tag_names_the_c_library_that_is_asked_for(libraries, tmp_path, monkeypatch, content, tag):
    library = tmp_path / "some.so"
    library.write_bytes(content)
    monkeypatch.setattr("sysconfig.get_platform", lambda: "linux-x86_64")
    assert libraries.wheel_tag([library]) == tag
