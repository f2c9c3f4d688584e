"""The side-by-side run's own arithmetic and commands; servers are started only by `make bench-peers`."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.peer_servers import Place, servers
from bench.peer_tables import Visit, tables

HERE = Path(__file__).parent


def visit(server, rate, number, work="8"):
    return Visit(server, "int8", work, number, rate, 0.5, 0.02, (20.0, 40.0))


def test_ratios_are_taken_round_by_round_against_the_best_peer_of_that_round():
    rounds = {"llmbox int8": [30, 40], "one": [10, 40], "other": [15, 20]}
    result = {
        "servers": {name: {"start_s": 1.0, "memory": 2e9} for name in rounds},
        "visits": [visit(name, rate, i) for name, rates in rounds.items() for i, rate in enumerate(rates)],
    }
    told = tables(result, ["8"])
    assert "| **llmbox int8 / best peer** | 1.50 (1.00..2.00) |" in told
    assert "| other | 17.5 | 1.0 s | 2.00 GB |" in told
    assert "30 GB/s (20..40)" in told


def test_work_that_a_server_does_not_take_is_no_zero():
    result = {
        "servers": {"llmbox int8": {"start_s": 1.0, "memory": 1e9}},
        "visits": [visit("llmbox int8", 3.0, 1, work="1")],
    }
    assert "| llmbox int8 | 3 | - |" in tables(result, ["1", "8"])


@pytest.mark.parametrize("width", ["bf16", "int8", "int4"])
def test_every_server_listens_on_loopback_with_the_threads_asked_for(width):
    place = Place(Path("/m/shape"), Path("/g"), Path("/v/python"), Path("/l"), 3, Path("/tmp/x"))
    found = servers(place, width)
    assert found[0].name.startswith("llmbox")
    assert len({server.name for server in found}) == len(found)
    for server in found:
        words = " ".join(server.command)
        assert "{port}" in words
        assert "-t 3 " in words or "--threads 3 " in words or server.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"
        assert "llmbox" in server.name or "--host 127.0.0.1" in words


def test_peers_that_are_not_installed_are_left_out():
    place = Place(Path("/m/shape"), None, None, None, 2, Path("/tmp/x"))
    assert {server.name for server in servers(place, "bf16")} == {"llmbox bf16"}


def test_a_missing_model_folder_is_said_with_what_makes_one():
    command = [sys.executable, "-P", str(HERE / "peers.py"), "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": "packaging/tree"})
    assert done.returncode == 2
    assert "random_model.py" in done.stderr
