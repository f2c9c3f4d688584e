"""Build a release into a folder: sdist, wheels, .deb, .rpm, man pages, a bill of materials and SHA256SUMS.

The .deb and the .rpm hold a virtual environment under /opt/llmbox with every dependency, on the system's own
Python of the same minor version: installing one needs no network. Which build of torch goes in is pip's
choice; set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL for one without CUDA.

The wheels are one for this machine and one for each of `CROSS_COMPILERS` that is installed.

By hand: `make release`, or `python packaging/release.py --out dist`.
"""

import argparse
import gzip
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from llmbox import __version__

# `make` sets PYTHONSAFEPATH, and then a script does not find those beside it.
sys.path.append(str(Path(__file__).parent))
from kernel_libraries import wanted_levels
from man_pages import write_pages

ROOT = Path(__file__).parents[1]
LINUX = ROOT / "packaging" / "linux"
CONSTRAINTS = ROOT / "packaging" / "constraints.txt"
HOME = Path("/opt/llmbox")
"""Where the packages put the environment."""
LAUNCHER = """\
#!{home}/bin/python3 -sP
from llmbox.__main__ import main

main()
"""
COMPLETIONS = {
    "bash": "share/bash-completion/completions/llmbox",
    "zsh": "zsh/_llmbox",
    "fish": "share/fish/vendor_completions.d/llmbox.fish",
}
"""Files of the stage. Debian and Fedora keep zsh's in different folders: nfpm.yaml has both."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Names of nfpm for `platform.machine()`."""
CROSS_COMPILERS = {"aarch64": "aarch64-linux-gnu-g++"}
"""Compilers of the kernels in wheels for other machines."""


def build_release(out: Path, python: Path, homepage: str = "", extra: Iterable[str] = ()) -> list[Path]:
    """Build everything into `out`. Returns its files.

    python: the system's interpreter that the packages will run on.
    homepage: address that the packages name; empty: none.
    extra: arguments for pip, such as `--no-deps`.
    """
    out.mkdir(parents=True, exist_ok=True)
    _run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    others = tuple(f"_{machine}" for machine in CROSS_COMPILERS if machine != platform.machine())
    wheel = next(path for path in out.glob(f"llmbox-{__version__}-*.whl") if not path.stem.endswith(others))
    require_levels(wheel, platform.machine())
    for machine in others:
        print(build_cross_wheel(machine.removeprefix("_"), out))
    with tempfile.TemporaryDirectory(prefix="llmbox-release-") as folder:
        stage = Path(folder)
        make_environment(stage, wheel, python, extra)
        make_shared_files(stage)
        _pack_man_pages(stage / "share" / "man", out / f"llmbox-{__version__}-man.tar.gz")
        for kind in ("deb", "rpm"):
            make_package(kind, stage, python_version(python), out, homepage)
        make_bill_of_materials(stage, out / f"llmbox-{__version__}.cdx.json")
    return [*_files(out), write_checksums(out)]


def build_cross_wheel(machine: str, out: Path) -> str:
    """Build the wheel with kernels for another machine into `out`, if its compiler is installed.

    Returns a line for the user.
    """
    compiler = CROSS_COMPILERS[machine]
    if shutil.which(compiler) is None:
        package = f"g++-{compiler.removesuffix('-g++')}"
        return f"no wheel for {machine}: {compiler} is missing; install it with: apt install {package}"
    before = set(out.glob("*.whl"))
    environ = {**os.environ, "CXX": compiler, "LLMBOX_WHEEL_MACHINE": machine}
    command = (sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT))
    if code := subprocess.run(command, check=False, stdout=subprocess.PIPE, env=environ).returncode:
        sys.exit(f"the wheel for {machine} ended with {code}")
    made = set(out.glob("*.whl")) - before
    for path in made:
        if not path.stem.endswith(f"_{machine}"):  # its warnings say why
            path.unlink()
            return f"no wheel for {machine}: {compiler} could not compile the kernels"
        require_levels(path, machine)
    return f"a wheel for {machine}: {', '.join(path.name for path in made) or 'the one that was there'}"


def require_levels(wheel: Path, machine: str) -> None:
    """End the release if `wheel` lacks an instruction set of `machine`: the build only warns of that."""
    with zipfile.ZipFile(wheel) as archive:
        stems = {Path(name).stem.rpartition("-")[0] for name in archive.namelist() if name.endswith(".so")}
    if missing := [level.name for level in wanted_levels(machine) if level.name not in stems]:
        sys.exit(f"{wheel.name} has no kernels for {', '.join(missing)}: its warnings above say why")


def make_environment(stage: Path, wheel: Path, python: Path, extra: Iterable[str] = ()) -> None:
    """Install `wheel` and its dependencies as they will lie under /opt/llmbox."""
    home = stage / HOME.relative_to("/")
    _run(python, "-m", "venv", "--without-pip", "--symlinks", home)
    inside = home / "bin" / "python3"
    _run(
        *(sys.executable, "-m", "pip", "--python", inside, "install", "--quiet", "--no-compile"),
        *("--constraint", CONSTRAINTS, *extra, wheel),
    )
    for script in home.joinpath("bin").iterdir():
        if not script.is_symlink():  # activation and entry points, with the stage's path in them
            script.unlink()
    launcher = home / "bin" / "llmbox"
    launcher.write_text(LAUNCHER.format(home=HOME))
    launcher.chmod(0o755)
    config = home / "pyvenv.cfg"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("command")]
    config.write_text("\n".join(lines) + "\n")
    # Daemons cannot write there: without compiled modules every start would compile them again. Some packages
    # ship templates that are no Python.
    options = ("-q", "-q", "-s", stage, "--invalidation-mode", "unchecked-hash")
    _run(inside, "-m", "compileall", *options, home / "lib", check=False)


def make_shared_files(stage: Path) -> None:
    """Write man pages, completions, the license and the changes as they lie under /usr/share."""
    share = stage / "share"
    for page in write_pages(share / "man" / "man1"):
        page.with_name(f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
        page.unlink()
    for shell, name in COMPLETIONS.items():
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_run(sys.executable, "-P", "-m", "llmbox", "completion", shell))
    texts = share / "doc" / "llmbox"
    texts.mkdir(parents=True)
    shutil.copyfile(ROOT / "LICENSE", texts / "copyright")
    shutil.copyfile(ROOT / "README.md", texts / "README.md")
    (texts / "changelog.gz").write_bytes(gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), mtime=0))


def make_package(kind: str, stage: Path, version: tuple[int, int], out: Path, homepage: str = "") -> None:
    """Build the package of `kind` (deb or rpm) with nfpm."""
    major, minor = version
    variables = {
        "ARCH": ARCHITECTURES[platform.machine()],
        "HOMEPAGE": homepage,
        "LINUX": str(LINUX),
        "NEXT_PYTHON": f"{major}.{minor + 1}",
        "PYTHON": f"{major}.{minor}",
        "STAGE": str(stage),
        "VERSION": __version__,
    }
    text = LINUX.joinpath("nfpm.yaml").read_text("utf-8")
    for name, value in variables.items():  # nfpm itself fills in some of the fields alone
        text = text.replace("${" + name + "}", value)
    config = stage / f"{kind}.yaml"
    config.write_text(text, "utf-8")
    _run(tool("nfpm"), "package", "--config", config, "--packager", kind, "--target", f"{out}/")


def make_bill_of_materials(stage: Path, path: Path) -> None:
    """Write what the environment is made of, as CycloneDX JSON."""
    inside = stage / HOME.relative_to("/") / "bin" / "python3"
    _run(tool("cyclonedx-py"), "environment", "--output-reproducible", "-o", path, inside)


def write_checksums(out: Path) -> Path:
    """Write SHA256SUMS, which `sha256sum --check` reads."""
    path = out / "SHA256SUMS"
    path.unlink(missing_ok=True)
    lines = []
    for file in _files(out):
        with file.open("rb") as opened:
            lines.append(f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}\n")
    path.write_text("".join(lines))
    return path


def python_version(python: Path) -> tuple[int, int]:
    """Minor version of an interpreter: the packages' modules are for no other."""
    major, minor = _run(python, "-c", "import sys; print(*sys.version_info[:2])").split()
    return int(major), int(minor)


def tool(name: str) -> Path:
    """Path of a tool that release-requirements.txt brings."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        sys.exit(f"{name} is missing; install it with: pip install -r packaging/release-requirements.txt")
    return path


def _pack_man_pages(folder: Path, path: Path) -> None:
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, "man")


def _files(out: Path) -> list[Path]:
    return sorted(path for path in out.iterdir() if path.is_file() and __version__ in path.name)


def _run(*command: object, check: bool = True) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, text=True, stdout=subprocess.PIPE)
    if check and done.returncode != 0:
        sys.exit(f"{' '.join(words[:4])} … ended with {done.returncode}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files")
    parser.add_argument(
        "--python", type=Path, default=Path("/usr/bin/python3"), help="interpreter that the packages run on"
    )
    parser.add_argument("--homepage", default="", metavar="URL", help="address that the packages name")
    options = parser.parse_args()
    for path in build_release(options.out.resolve(), options.python, options.homepage):
        print(f"{path.stat().st_size:>12,}  {path.name}")


if __name__ == "__main__":
    main()
