"""The interpreter runs kernels as Python: what the compiler refuses shows only here. No GPU is needed."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED_LIMIT = {9: 232448, 8: 101376}
"""Bytes a block may have; of capability 8.x the least, 8.6's."""


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = HERE.parents[2]
    paths = [str(root / "packaging/tree"), str(root / "tests")]
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, HERE / "compile_all.py"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(kernel["cubin"] > 0 for kernel in kernels)
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT[kernel["capability"][0]], kernel

    on_hopper = defaultdict(list)
    for kernel in kernels:
        if kernel["capability"] == [9, 0]:
            on_hopper[kernel["name"]].append(kernel)
    sources = "".join(path.read_text() for path in (HERE.parents[2] / "kernels/triton").glob("*.py"))
    declared = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    assert declared == set(on_hopper)
    # Prompts and products of many rows must reach Hopper's own tensor core instructions.
    for name in ("attention_kernel", "product_kernel", "int8_kernel", "fp8_kernel", "experts_kernel"):
        assert any(kernel["wgmma"] for kernel in on_hopper[name]), name
