"""Programs from npm, as their authors ship them, kept in a cache folder for later runs."""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALLS = "LLMBOX_TEST_CLIENTS"
"""Set by `make test-clients`: what is not there is installed. The suite alone takes what it finds."""


def npm_program(package: str, version: str, program: str, quicker: str = "") -> Path:
    """The program's path, or the test is skipped with the reason.

    `quicker`: a program of the same dialect, which the suite takes instead.
    """
    if quicker and INSTALLS not in os.environ:
        pytest.skip(f"make test-clients runs {package}; the suite has {quicker}, of the same dialect")
    if shutil.which("node") is None:
        pytest.skip("there is no node to run programs from npm")
    folder = _cache() / f"{package.replace('@', '').replace('/', '-')}-{version}"
    found = folder / "node_modules" / ".bin" / program
    if found.exists():
        return found
    if INSTALLS not in os.environ:
        pytest.skip(f"{package} {version} is not installed: make test-clients does that")
    if shutil.which("npm") is None:
        pytest.skip(f"there is no npm to install {package} {version}")
    _install(folder, f"{package}@{version}")
    return found


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmbox-tests" / "npm"


def _install(folder: Path, what: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "node_modules").exists():
            return
        beside = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(beside, ignore_errors=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(beside), what]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm did not install {what} in 15 minutes")
        if done.returncode:
            pytest.skip(f"npm cannot install {what}: {done.stderr.strip()[-300:]}")
        folder.rmdir()
        beside.rename(folder)
