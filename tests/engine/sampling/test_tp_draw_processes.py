"""Kernels, gloo and processes together: what ranks draw from parts of the logits is what one draws."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.lanes import NIGHTLY, nightly

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "vocab"), [(2, 700), nightly(3, 4500)])
def test_tokens_of_ranks_are_those_of_one(tmp_path, ranks, vocab):
    seed = int.from_bytes(os.urandom(4)) if NIGHTLY else 1  # in the message of a failure
    program = [sys.executable, "-P", "-W", "ignore", Path(__file__).with_name("tp_draw_processes.py")]
    paths = os.pathsep.join([str(ROOT / "packaging/tree"), str(ROOT / "tests")])
    done = subprocess.run(
        [*program, tmp_path, str(ranks), str(vocab), str(seed)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
