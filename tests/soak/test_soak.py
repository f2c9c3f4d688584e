"""A short soak each night: adapters, pictures, model swaps and the KV cache on disk are in play."""

import argparse
from pathlib import Path

import pytest

from soak.run import soak


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.process
def test_the_pass_rule_holds_after_the_first_faults(tmp_path: Path) -> None:
    options = argparse.Namespace(minutes=10.0, every=1.0, faults=3, clients=4, seed=1)
    lines, failure = soak(tmp_path, options)
    assert failure == "", lines
    assert [line.split()[1] for line in lines[:3]] == ["kill_engine", "swap_models", "damage_kv_files"]
    assert all(f"answers of {name}" in lines[4] for name in ("builtin", "tiny", "pirate", "poet", "eye"))
    assert "tokens read from the KV cache on disk" in lines[5]
