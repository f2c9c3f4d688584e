"""The side-by-side run's own arithmetic and commands; servers are started only by `make bench-peers`."""

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.peer_servers import Place, servers
from bench.peer_tables import CHAT_TOKENS, Visit, tables
from bench.random_model import write_tokenizer

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


def test_a_peer_that_failed_in_a_round_is_not_compared():
    rounds = {"llmbox int8": [30, 40], "whole": [10, 10], "failed": [90]}
    result = {
        "servers": {name: {"start_s": 1.0, "memory": 2e9} for name in rounds},
        "visits": [visit(name, rate, i) for name, rates in rounds.items() for i, rate in enumerate(rates)],
    }
    assert "| **llmbox int8 / best peer** | 3.50 (3.00..4.00) |" in tables(result, ["8"])


def test_a_chat_tells_both_turns_and_how_much_sooner_the_second_one_answers():
    second = Visit("llmbox int8", "int8", "chat", 1, (CHAT_TOKENS + 64) / 0.25, 5.0, None, (20.0, 40.0))
    result = {"servers": {"llmbox int8": {"start_s": 1.0, "memory": 1e9}}, "visits": [second]}
    assert "| llmbox int8 | 5000 | 250 | 20.00 (20.00..20.00) |" in tables(result, ["chat"])


@pytest.mark.parametrize("width", ["bf16", "int8", "int4", "q4_k_m"])
def test_every_server_listens_on_loopback_with_the_threads_asked_for(width):
    peers = Path("/g"), Path("/v/python"), Path("/l"), Path("/ik")
    place = Place(Path("/m/shape"), *peers, 3, Path("/tmp/x"))
    found = servers(place, width)
    assert len({server.name.split()[0].strip(",") for server in found}) == (4 if width == "bf16" else 3)
    assert found[0].name.startswith("llmbox")
    assert len({server.name for server in found}) == len(found)
    for server in found:
        words = " ".join(server.command)
        assert "{port}" in words
        assert "-t 3 " in words or "--threads 3 " in words or server.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"
        assert "llmbox" in server.name or "--host 127.0.0.1" in words


def test_peers_that_are_not_installed_are_left_out():
    place = Place(Path("/m/shape"), None, None, None, None, 2, Path("/tmp/x"))
    assert {server.name for server in servers(place, "bf16")} == {"llmbox bf16"}


def test_of_one_gguf_file_all_servers_read_that_file(tmp_path):
    file = tmp_path / "shape.gguf"
    file.touch()
    place = Place(file, None, None, Path("/l"), Path("/ik"), 2, tmp_path)
    found = servers(place, file.stem)
    assert {server.name.partition(",")[0] for server in found} == {"llmbox", "llama.cpp", "ik_llama.cpp"}
    assert all(str(file) in server.command for server in found)


def test_words_of_made_up_tokenizers_and_their_merge_are_of_one_vocabulary(tmp_path):
    write_tokenizer(tmp_path, 400)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 400
    assert len(tokenizer.encode("ab").ids) == 1


def test_a_missing_model_folder_is_said_with_what_makes_one():
    command = [sys.executable, "-P", str(HERE / "peers.py"), "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": "packaging/tree"})
    assert done.returncode == 2
    assert "random_model.py" in done.stderr
