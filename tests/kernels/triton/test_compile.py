"""The interpreter runs kernels as Python: what the compiler refuses shows only here. No GPU is needed."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import triton

from support.compiled_programs import delete_unused
from support.lanes import NIGHTLY, nightly

ROOT = Path(__file__).parents[3]
CACHE = Path(tempfile.gettempdir()) / f"llmbox-test-triton-{os.geteuid()}"
"""Compiled kernels of earlier runs. Triton finds one by its source, its arguments and the compiler's version:
only kernels that have changed are compiled again. Beside them, what was told of all kernels of the same
sources: then none is even looked for. A night begins with nothing.
"""
SOURCES = ("kernels", "engine", "tests/gpu", "tests/support")
"""Folders with all code that the compilation runs."""
MOST_SPILLED = 64
"""Bytes a thread. A few registers' worth goes to the first cache; more is a tile that is too large."""

LONGEST_LOOP = {"scan_kernel": 900, "scan_chunks_kernel": 600}
"""Instructions of a warp for a row, and for a chunk of 16 rows: the time of a prompt follows from them."""


def digest_sources(target: int, choice: str) -> str:
    digest = hashlib.sha256(f"{target} {choice} {triton.__version__} {torch.__version__}".encode())
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def compile_all(target: int, choice: str, cache: Path) -> str:
    """Return a line of JSON for each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([f"{ROOT}/packaging/tree", f"{ROOT}/tests"])
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    command = [sys.executable, "-P", "-m", "gpu.compile", choice, "--json", "--jobs", "1"]
    command += ["--targets", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "choice"), [(90, "--once"), nightly(90, "--few"), nightly(80, "--few"), nightly(89, "--few")]
)
def test_every_kernel_compiles_and_fits(tmp_path: Path, target: int, choice: str) -> None:
    """For Hopper; each night in more variants, and for an A100 and an RTX 4090 too, which lack some of its
    instructions.
    """
    cache = tmp_path if NIGHTLY else CACHE
    told = cache / "told" / digest_sources(target, choice)
    if not told.exists():
        told.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = compile_all(target, choice, cache)
        written = told.with_name(f"{told.name}.{os.getpid()}")
        written.write_text(lines)
        written.replace(told)
    os.utime(told)
    delete_unused(told.parent)
    kernels = [json.loads(line) for line in told.read_text().splitlines()]
    for kernel in kernels:
        assert kernel["cubin"] > 0
        assert kernel["spilled"] <= MOST_SPILLED, kernel

    by_name = defaultdict(list)
    for kernel in kernels:
        by_name[kernel["name"]].append(kernel)
    sources = "".join(path.read_text() for path in (ROOT / "kernels/triton").rglob("*.py"))
    declared = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    assert declared == set(by_name)
    if target != 90:
        return
    for name, most in LONGEST_LOOP.items():
        assert 0 < max(kernel["loop"] for kernel in by_name[name]) <= most, name
    # Prompts and products of many rows must reach Hopper's own tensor core instructions.
    for name in ("attention_kernel", "product_kernel", "int8_kernel", "fp8_kernel", "experts_kernel"):
        assert any(kernel["wgmma"] for kernel in by_name[name]), name
