"""Make a folder with Python, PyTorch and what llmbox imports for Arm, which QEMU runs on x86-64.

    python -P tests/kernels/cpu/arm_root.py /var/tmp/arm-root
    LLMBOX_ARM_ROOT=/var/tmp/arm-root LLMBOX_TEST_PROFILE=nightly .venv/bin/pytest -k whole tests/kernels/cpu

It needs Debian 12 with Python 3.11, qemu-user-static, a network and 1.2 GB; no rights of root. The system's
own packages are left alone. This version of PyTorch is one whose wheel for Arm on PyPI is without CUDA.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

TREE = Path(__file__).parents[3]
PACKAGES = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6", "libgomp1")
TORCH = "torch==2.10.0"
NEEDED = ("sympy", "networkx", "jinja2", "fsspec", "filelock", "pytest")
"""Imports of PyTorch, and of helpers of the tests."""
PLATFORMS = (
    "manylinux_2_31_aarch64",
    "manylinux_2_28_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)
FEATURES = "fp asimd atomics asimdrdm crc32 asimddp i8mm"
"""Those of QEMU's largest CPU that levels need; otherwise it shows the host's /proc/cpuinfo."""


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    (root / "proc").mkdir(parents=True, exist_ok=True)
    unpack_debian(root)
    install_wheels(root)
    (root / "proc" / "cpuinfo").write_text(f"Features\t: {FEATURES}\n")
    python = root / "usr" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec qemu-aarch64-static -L {root} -0 {python} {python}3.11 "$@"\n')
    python.chmod(0o755)
    subprocess.run([python, "-P", "-c", "import torch; print(torch.__version__)"], check=True)


def unpack_debian(root: Path) -> None:
    """Unpack Debian's packages for Arm, fetched with lists and settings of their own."""
    apt = root / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(
        f'APT::Architecture "arm64"; APT::Architectures {{ "arm64"; }}; Debug::NoLocking "1";\n'
        f'Dir::State "{apt}/state"; Dir::State::status "{apt}/status"; Dir::Cache "{apt}/cache";\n'
    )
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    subprocess.run(["apt-get", "update"], env=environment, check=True)
    fetch = ("apt-get", "install", "-y", "--no-install-recommends", "--download-only")
    subprocess.run([*fetch, *PACKAGES], env=environment, check=True)
    for package in sorted(apt.glob("cache/archives/*.deb")):
        subprocess.run(["dpkg", "-x", package, root], check=True)


def install_wheels(root: Path) -> None:
    """Install wheels for Arm: the dependencies of pyproject.toml, and PyTorch without its own."""
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    wanted = [each for each in project["dependencies"] if not each.startswith("torch")]
    pins = root / "constraints.txt"
    lines = (TREE / "packaging" / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if not line.startswith("torch==")) + "\n")
    place = root / "usr" / "lib" / "python3" / "dist-packages"
    command = [sys.executable, "-m", "pip", "install", "--upgrade", "--target", str(place)]
    command += ["--python-version", "3.11", "--implementation", "cp", "--only-binary", ":all:"]
    for platform in (*PLATFORMS, "any"):
        command += ["--platform", platform]
    for abi in ("cp311", "abi3", "none"):
        command += ["--abi", abi]
    subprocess.run([*command, "--constraint", str(pins), *wanted, *NEEDED], check=True)
    subprocess.run([*command, "--no-deps", TORCH], check=True)


if __name__ == "__main__":
    main()
