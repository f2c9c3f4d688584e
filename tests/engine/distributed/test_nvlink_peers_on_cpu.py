"""What NVLink peers set up, try and use, in processes that share memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.lanes import TESTS, nightly


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [nightly(2), 3])
def test_sums_go_through_memory_of_all_from_their_setting_up_on(tmp_path, ranks):
    command = [sys.executable, "-P", str(Path(__file__).with_name("nvlink_peers_on_cpu.py")), str(tmp_path)]
    done = subprocess.run(
        [*command, str(ranks)],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr, "settings of this torch"
