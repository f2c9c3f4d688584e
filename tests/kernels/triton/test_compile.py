"""The interpreter runs kernels as Python: what the compiler refuses shows only here. No GPU is needed."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from gpu.compile import Kernel
from support.lanes import NIGHTLY, nightly

ROOT = Path(__file__).parents[3]
CACHE = Path(tempfile.gettempdir()) / f"llmbox-test-triton-{os.geteuid()}"
"""Compiled kernels of earlier runs. Triton finds one by its source, its arguments and the compiler's version:
only kernels that have changed are compiled again. A night begins with none.
"""
MOST_SPILLED = 64
"""Bytes a thread. A few registers' worth goes to the first cache; more is a tile that is too large."""

LONGEST_LOOP = {"scan_kernel": 900, "scan_chunks_kernel": 600}
"""Instructions of a warp for a row, and for a chunk of 16 rows: the time of a prompt follows from them."""
MOST_ISSUED = {
    "decode, 16 rows, heads of 128, bf16": 0.22,
    "decode, 16 rows, heads of 128, fp8e4nv": 0.7,
    "16 rows, 8 bits in groups of 128": 0.8,
    "16 rows, 4 bits in groups of 128": 1.5,
    "16 rows, 4 bits in groups of 128, steps": 2.0,
}
"""Time to issue a turn of the main loop, in that of its reads on an H200 (`gpu/static_roofline.py`)."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "choice"), [(90, "--once"), nightly(90, "--few"), nightly(80, "--few"), nightly(89, "--few")]
)
def test_every_kernel_compiles_and_fits(tmp_path: Path, target: int, choice: str) -> None:
    """For Hopper; each night in more variants, and for an A100 and an RTX 4090 too, which lack some of its
    instructions.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([f"{ROOT}/packaging/tree", f"{ROOT}/tests"])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path if NIGHTLY else CACHE), "PYTHONPATH": paths}
    command = [sys.executable, "-P", "-m", "gpu.compile", choice, "--json", "--jobs", "1"]
    command += ["--targets", str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    for kernel in kernels:
        assert kernel["cubin"] > 0
        assert kernel["spilled"] <= MOST_SPILLED, kernel

    by_name = defaultdict(list)
    for kernel in kernels:
        by_name[kernel["name"]].append(kernel)
    sources = "".join(path.read_text() for path in (ROOT / "kernels/triton").rglob("*.py"))
    declared = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    if target != 90:  # only the variants that differ there
        assert by_name.keys() <= declared
        return
    assert declared == set(by_name)
    for name, most in LONGEST_LOOP.items():
        assert 0 < max(kernel["loop"] for kernel in by_name[name]) <= most, name
    issued = {
        one.variant: one.issue_share for one in (Kernel(**kernel) for kernel in kernels) if one.turn_bytes
    }
    for variant, most in MOST_ISSUED.items():
        assert 0 < issued[variant] <= most, variant
    # Prompts and products of many rows must reach Hopper's own tensor core instructions.
    for name in ("attention_kernel", "product_kernel", "int8_kernel", "fp8_kernel", "experts_kernel"):
        assert any(kernel["wgmma"] for kernel in by_name[name]), name
