"""Experts that change ranks while an engine runs: balanced better, nowhere lost, and no token changes."""

import random
from dataclasses import replace

import pytest
import torch

from llmbox.engine.core.adapter_slots import AdapterSlots
from llmbox.engine.executor import expert_load, expert_moves
from llmbox.engine.executor.expert_load import LoadHistory, place_experts, placed_imbalance
from llmbox.engine.executor.expert_moves import balance_layer
from support.adapters import plain_tensors, write_adapter
from support.families import make_family
from support.rank_threads import load_threads
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

SIZES = {"num_key_value_heads": 4, "mlp_only_layers": [], "intermediate_size": 256}
CUT = {"tp": 2, "expert_parallel": True, "redundant_experts": 2}
REQUESTS = [
    ask("long", range(3, 43), 24),
    ask("short", [5, 9, 11], 24, temperature=0.8, seed=3),
    ask("other", range(7, 30), 24, temperature=0.9, top_k=9, seed=5),
]


def held(holders, ranks):
    return [sum(rank in each for each in holders) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant"), [(8, 2, 0), (8, 2, 2), (7, 2, 4), (9, 4, 5), (5, 4, 15), (64, 8, 9)]
)
def test_moves_even_ranks_out_and_leave_each_expert_somewhere(experts, ranks, redundant):
    chance = random.Random(experts * redundant)
    for _ in range(20):
        before = [int(chance.paretovariate(0.8)) for _ in range(experts)]
        load = [int(100 * chance.paretovariate(0.8)) for _ in range(experts)]
        (start,) = place_experts([before], ranks, redundant)
        holders = start
        for move in balance_layer(0, load, start, ranks):
            assert move.source in holders[move.expert]
            assert move.destination in holders[move.replaced]
            assert move.destination not in holders[move.expert]
            holders = move.apply(holders)
            assert all(each == tuple(sorted(set(each))) and each for each in holders)
            assert held(holders, ranks) == held(start, ranks)
        assert placed_imbalance([holders], [load], ranks) <= placed_imbalance([start], [load], ranks) + 0.05


def test_copies_go_to_the_hot_expert_and_moves_are_few():
    load = [10] * 16
    load[9] = 900
    (start,) = place_experts([[0] * 16], 2, 2)
    moves = balance_layer(0, load, start, 2)
    holders = start
    for move in moves:
        holders = move.apply(holders)
    assert placed_imbalance([start], [load], 2) > 1.7
    assert placed_imbalance([holders], [load], 2) < 1.05
    assert len(moves) <= 4
    assert not balance_layer(0, load, holders, 2), "nothing is left to do"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """With a folder for what is kept of models, which says that expert 6 was hot."""
    monkeypatch.setenv("LLMBOX_REPACKED", str(tmp_path / "kept"))
    monkeypatch.setenv("LLMBOX_REPACKED_GB", "1")
    monkeypatch.setattr(expert_load, "READ_SECONDS", 0.0)
    model = make_tiny_model(tmp_path / "model", arch="qwen3_moe", tokenizer=False, **SIZES)
    LoadHistory.of_model(model).save([[1000 if expert == 6 else 1 for expert in range(8)]] * 2)
    return model


@pytest.fixture
def restless(monkeypatch):
    """Experts move whenever something was counted and it helps at all."""
    monkeypatch.setattr(expert_moves, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(expert_moves, "LONGEST_CHECK", 0.0)
    monkeypatch.setattr(expert_moves, "ROWS_OF_EXPERT", 1)
    monkeypatch.setattr(expert_moves, "WORTH_IT", 1.0)


def holders_of(engine):
    return [list(owners.holders) for _, owners in engine._experts._balancer._layers]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.usefixtures("restless")
def test_no_move_amid_streams_changes_a_token(model, monkeypatch, tp):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    wanted = tokens(load(model), REQUESTS)
    engine = load_threads(model, **{**CUT, "tp": tp}, dtype="float32")
    start = holders_of(engine)
    assert tokens(engine, REQUESTS) == wanted
    moved = engine.stats().expert_moves
    assert moved > 0
    assert holders_of(engine) != start
    assert tokens(engine, [ask("again", range(50, 90), 24)]) == tokens(
        load(model), [ask("again", range(50, 90), 24)]
    )


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
@pytest.mark.usefixtures("restless")
def test_ranks_that_are_processes_move_packed_weights(model, tmp_path, arch):
    """Biases too. The second load maps the weights from a file, which moves leave as it is."""
    if arch != "qwen3_moe":
        model = make_family(tmp_path / arch, arch)
    options = {"quant": "int8-g32", "dtype": "float32", **CUT}
    still = load(model, **{**options, "redundant_experts": 0})
    wanted = tokens(still, REQUESTS)
    still.close()
    for _ in range(2):
        engine = load(model, **options)
        for number in range(10_000):  # nothing moves until both ranks have written their weights to disk
            tokens(engine, [ask("wait", [number % 300, 5, 7], 1)])
            if engine.stats().expert_moves:
                break
        assert engine.stats().expert_moves > 0
        assert tokens(engine, REQUESTS) == wanted
        engine.close()


@pytest.mark.usefixtures("restless")
def test_an_adapter_that_comes_after_moves_finds_its_experts(model, monkeypatch, tmp_path):
    """And as long as it is there nothing moves."""
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    adapter = tmp_path / "adapter"
    torch.manual_seed(1)
    tensors = {}
    for expert in range(8):
        for part, size in {"gate_proj": (64, 48), "up_proj": (64, 48), "down_proj": (48, 64)}.items():
            tensors |= plain_tensors(*size, name=f"model.layers.1.mlp.experts.{expert}.{part}")
    write_adapter(adapter, {name: 4 * tensor for name, tensor in tensors.items()})
    asked = [replace(ask("adapted", range(60, 90), 12), adapter=str(adapter))]
    plain = load(model, dtype="float32")
    plain.scheduler.kv_cache.adapters = AdapterSlots(2, 1 << 20)
    wanted = tokens(plain, asked)
    engine = load_threads(model, **CUT, dtype="float32")
    engine.scheduler.kv_cache.adapters = AdapterSlots(2, 1 << 20)
    tokens(engine, REQUESTS)
    moved = engine.stats().expert_moves
    assert moved > 0
    assert wanted != tokens(plain, [replace(each, adapter="") for each in asked])
    assert tokens(engine, asked) == wanted
    tokens(engine, REQUESTS)
    assert engine.stats().expert_moves <= moved + 2, "one move may go before the step that loads it"


def test_weights_that_are_still_written_to_disk_do_not_move(model, monkeypatch, restless):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    monkeypatch.setattr(expert_moves, "is_writing", lambda: True)
    engine = load_threads(model, **CUT, dtype="float32")
    start = holders_of(engine)
    tokens(engine, REQUESTS)
    assert holders_of(engine) == start
    assert engine.stats().expert_moves == 0
