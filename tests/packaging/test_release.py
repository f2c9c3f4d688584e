"""Release files: man pages of all commands, packages that hold a working program, checksums that hold."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest

from llmbox import __version__
from llmbox.app.cli.root import COMMANDS, cli

PACKAGING = Path(__file__).parents[2] / "packaging"
SYSTEM_PYTHON = Path(sys.base_prefix) / "bin" / "python3"


@pytest.fixture(scope="module")
def release():
    try:
        spec = importlib.util.spec_from_file_location("release", PACKAGING / "release.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(PACKAGING))  # it finds the scripts beside it by itself
    return module


def run(*command: object, **environ: str) -> str:
    env = {**os.environ, **environ}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def stage(release, tmp_path_factory) -> Path:
    """What the packages hold, without dependencies."""
    folder = tmp_path_factory.mktemp("release")
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, PACKAGING.parent)
    run(*build, LLMBOX_WHEEL_KERNELS="none")
    release.make_environment(folder / "stage", next(folder.glob("*.whl")), SYSTEM_PYTHON, ["--no-deps"])
    release.make_shared_files(folder / "stage")
    return folder / "stage"


def test_make_starts_it():
    assert "--out" in run(sys.executable, PACKAGING / "release.py", "--help", PYTHONSAFEPATH="1")


def test_every_command_has_a_man_page_with_its_options(release, tmp_path):
    pages = {path.name: path.read_text() for path in release.write_pages(tmp_path)}
    assert {f"llmbox-{name}.1" for name in COMMANDS} | {"llmbox.1"} <= set(pages)
    context = click.Context(cli, info_name="llmbox")
    for name in COMMANDS:
        text = pages[f"llmbox-{name}.1"]
        for option in cli.get_command(context, name).params:
            for word in option.opts if isinstance(option, click.Option) and not option.hidden else ():
                assert word.replace("-", "\\-") in text, (name, word)


def test_lines_of_a_man_page_are_no_requests_by_accident(release):
    command = click.Command("each", help=".models is a folder.\n\n\b\n'quoted' \\ text\n.end")
    parent = click.Context(cli, info_name="llmbox")
    text = sys.modules["man_pages"].render_page(
        "each", click.Context(command, info_name="each", parent=parent)
    )
    assert "\n\\&.models is a folder." in text
    assert "\n\\&'quoted' \\e text\n\\&.end\n" in text


def test_a_deb_holds_the_program_its_pages_and_completions(release, stage, tmp_path):
    home = "https://llmbox.example"
    release.make_package("deb", stage, release.python_version(SYSTEM_PYTHON), tmp_path, home)
    (package,) = tmp_path.glob("*.deb")
    assert __version__ in package.name
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    major, minor = release.python_version(SYSTEM_PYTHON)
    needs = run("dpkg-deb", "--field", package, "Depends").strip().split(", ")
    assert {f"python3 (<< {major}.{minor + 1}~)", "libc6", "libstdc++6"} <= {*needs}
    assert run("dpkg-deb", "--field", package, "Homepage").strip() == home
    run("dpkg-deb", "--raw-extract", package, tmp_path / "root")
    root = tmp_path / "root"
    assert (root / "usr/bin/llmbox").readlink() == Path("/opt/llmbox/bin/llmbox")
    assert (root / "usr/share/man/man1/llmbox-pull.1.gz").is_file()
    assert (root / "usr/share/doc/llmbox/changelog.gz").is_file()
    assert "_LLMBOX_COMPLETE" in (root / "usr/share/bash-completion/completions/llmbox").read_text()
    assert [each.name for each in root.glob("usr/share/zsh/*/_llmbox")] == ["_llmbox"]
    assert (root / "usr/share/zsh/vendor-completions/_llmbox").is_file()
    assert "remove" in (root / "DEBIAN/prerm").read_text()
    # Dependencies are ours here; the program and its interpreter are the package's.
    program = (root / "opt/llmbox/bin/python3", root / "opt/llmbox/bin/llmbox", "--version")
    paths = os.pathsep.join(path for path in sys.path if "site-packages" in path)
    assert run(*program, PYTHONPATH=paths).split() == ["llmbox", __version__]


def test_no_file_of_the_environment_names_the_folder_it_was_made_in(stage):
    for path in stage.joinpath("opt").rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert str(stage).encode() not in path.read_bytes(), path


def test_an_rpm_is_for_the_python_it_was_made_with(release, stage, tmp_path):
    release.make_package("rpm", stage, release.python_version(SYSTEM_PYTHON), tmp_path)
    (package,) = tmp_path.glob("*.rpm")
    header = package.read_bytes()
    assert b"python(abi)" in header
    assert b"/usr/share/zsh/site-functions/" in header
    assert b"vendor-completions" not in header


def test_without_a_cross_compiler_the_release_says_how_to_get_one(release, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    line = release.build_cross_wheel("aarch64", tmp_path)
    assert line == (
        "no wheel for aarch64: aarch64-linux-gnu-g++ is missing; "
        "install it with: apt install g++-aarch64-linux-gnu"
    )


def test_a_wheel_that_lacks_an_instruction_set_ends_the_release(release, tmp_path, monkeypatch):
    monkeypatch.delenv("LLMBOX_WHEEL_KERNELS", raising=False)
    wheel = tmp_path / f"llmbox-{__version__}-py3-none-manylinux_2_36_aarch64.whl"

    def pack(*levels: str) -> None:
        with zipfile.ZipFile(wheel, "w") as archive:
            for level in levels:
                archive.writestr(f"llmbox/kernels/cpu/prebuilt/{level}-0123456789abcdef0123.so", "")

    pack("i8mm", "dotprod", "portable")
    release.require_levels(wheel, "aarch64")
    pack("portable")
    with pytest.raises(SystemExit, match=r"aarch64\.whl has no kernels for i8mm, dotprod"):
        release.require_levels(wheel, "aarch64")
    monkeypatch.setenv("LLMBOX_WHEEL_KERNELS", "none")
    release.require_levels(wheel, "aarch64")


def test_checksums_hold(release, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"llmbox-{__version__}-{name}").write_text(name)
    path = release.write_checksums(tmp_path)
    check = subprocess.run(
        ["sha256sum", "--strict", "--check", path.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert check.stdout.count(": OK") == 2, check.stderr
