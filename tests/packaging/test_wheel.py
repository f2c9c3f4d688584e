"""The wheel holds exactly our folders and compiled kernels, from the tree and from the sdist, and works."""

import os
import platform
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from llmbox.kernels.cpu.build import prebuilt_path
from llmbox.kernels.cpu.isa import LEVELS
from support.compiled_programs import keeping_compiler

ROOT = Path(__file__).parents[2]
VENDOR = ROOT / "ui/web/static/vendor"
FOLDERS = ("app", "engine", "kernels", "ui", "migrations")
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path | None = None, **environ: str) -> str:
    env = {**os.environ, "PYTHONSAFEPATH": "1", **environ}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def build(kind: str, source: Path, out: Path, kernels: str = "none", **environ: str) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source]
    run(*command, LLMBOX_WHEEL_KERNELS=kernels, **environ)
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def files_in_folders() -> set[str]:
    here = {
        f"llmbox/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    here |= {f"llmbox/docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    return here | {"llmbox/__init__.py", "llmbox/__main__.py", "llmbox/py.typed"}


def files_in_wheel(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if not name.split("/")[0].endswith(".dist-info")}


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as files:
        return files.read(next(name for name in files.namelist() if name.endswith("/WHEEL"))).decode()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """With kernels that were compiled without optimization, maybe in an earlier run."""
    folder = tmp_path_factory.mktemp("wheel")
    compiler = keeping_compiler(folder / "c++", LEVELS[-1])
    return build("wheel", ROOT, folder, kernels="portable", CXX=str(compiler))


def test_wheel_holds_the_folders_and_the_kernels_and_nothing_else(wheel):
    kernels = f"llmbox/kernels/cpu/prebuilt/{prebuilt_path(LEVELS[-1]).name}"
    assert files_in_wheel(wheel) == files_in_folders() | {kernels}


def test_wheel_with_kernels_is_for_this_kind_of_machine(wheel):
    _name, _version, python, abi, system = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert re.fullmatch(rf"manylinux_2_\d+_{platform.machine()}", system)
    assert f"Tag: py3-none-{system}\n" in metadata(wheel)
    assert "Root-Is-Purelib: false\n" in metadata(wheel)


def test_sdist_gives_the_same_wheel_and_without_kernels_it_is_for_every_machine(wheel, tmp_path):
    sdist = build("sdist", ROOT, tmp_path)
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    source = next(path for path in tmp_path.iterdir() if path.is_dir())
    assert not list(source.glob("*.log")), "what programs wrote here is no part of a release"
    brought = {path.name for path in (source / "ui/web/static/vendor").glob("*")}
    assert brought == {path.name for path in VENDOR.glob("*")}, "the wheel from it would ask npm again"
    again = build("wheel", source, tmp_path / "again")
    assert files_in_wheel(again) == files_in_folders()
    assert again.stem.endswith("-py3-none-any")
    assert "Root-Is-Purelib: true\n" in metadata(again)


def test_installed_command_works_in_a_clean_environment(wheel, tmp_path):
    home = tmp_path / "env"
    venv.create(home)
    pip = (sys.executable, "-m", "pip", "--python", home / "bin/python")  # a pip of its own takes seconds
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel)
    # Dependencies come from this environment: fetching them again would test the network, not the wheel.
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(packages))
    where = run(home / "bin/python", "-c", "import llmbox.app; print(llmbox.app.__file__)", cwd=tmp_path)
    assert str(home) in where
    assert "llmbox" in run(home / "bin/llmbox", "version", cwd=tmp_path)
    assert "builtin" in run(home / "bin/llmbox", "ls", "--data-dir", tmp_path / "data", cwd=tmp_path)
    which = "from llmbox.kernels import dispatch; print(dispatch.load_backend('cpu portable').origin)"
    assert run(home / "bin/python", "-c", which, cwd=tmp_path, CXX="no-such-compiler") == "prebuilt\n"


def test_packaging_is_not_a_package():
    """With an `__init__.py` here, a root on `sys.path` would shadow PyPA's `packaging`."""
    assert not (ROOT / "packaging/__init__.py").exists()
