"""Experts cut over ranks, or whole on each: the tokens of one process; how evenly rows choose them."""

import pytest
import torch

from llmbox.engine.errors import ParallelError
from llmbox.engine.executor.expert_load import ExpertLoad, mean_imbalance
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.kernels.op_types import ExpertOwners, Mixture
from support.lanes import nightly
from support.rank_threads import load_ranks, load_threads
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

REQUESTS = [
    ask("long", range(3, 43), 8),
    ask("short", [5, 9, 11], 8, temperature=0.8, seed=3),
    ask("other", range(7, 30), 8, temperature=0.9, top_k=9, seed=5),
]


@pytest.mark.parametrize(
    ("arch", "cut", "options"),
    [
        ("qwen3_moe", {"tp": 2}, {}),
        ("qwen3_moe", {"pp": 2}, {"dtype": "bfloat16", "quant": "int8"}),
        ("mixtral", {"tp": 2, "pp": 2}, {}),
        ("qwen3_moe", {"tp": 2}, {"quant": "int8"}),
        ("qwen3_moe", {"tp": 2, "pp": 2}, {"quant": "int4"}),
        ("mixtral", {"tp": 2}, {"quant": "int8-g32", "kv_dtype": "int8"}),
        ("qwen3_moe", {"tp": 2, "expert_parallel": True}, {}),
        ("mixtral", {"tp": 4, "expert_parallel": True}, {}),
        ("mixtral", {"tp": 2, "pp": 2, "expert_parallel": True}, {"quant": "int4"}),
        ("qwen3_moe", {"tp": 2, "expert_parallel": True}, {"quant": "int8"}),
        nightly("qwen3_moe", {"tp": 2, "expert_parallel": True}, {"quant": "int4-mix"}),
        nightly("mixtral", {"tp": 2, "expert_parallel": True}, {"quant": "int8-g32", "kv_dtype": "int8"}),
    ],
)
def test_ranks_give_the_tokens_of_one(tmp_path, monkeypatch, arch, cut, options):
    """A part of an expert is a whole number of groups: rounded as for one rank."""
    sizes = {"intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 4}
    if arch == "qwen3_moe":
        sizes["moe_intermediate_size"] = 256
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, **sizes)
    found = tokens(load_ranks(model, monkeypatch, **cut, **options), REQUESTS)
    assert found == tokens(load(model, **options), REQUESTS)


def test_experts_that_cannot_be_cut_are_refused_before_they_load(tmp_path):
    model = make_tiny_model(tmp_path, arch="qwen3_moe", tokenizer=False, moe_intermediate_size=49)
    with pytest.raises(ParallelError, match="49 inner rows of each expert"):
        load(model, tp=2)


def test_whole_experts_need_no_equal_parts_and_are_divided_unevenly(tmp_path, monkeypatch):
    """Seven experts of an odd size, which no two ranks could share as they do MLPs."""
    sizes = {"num_experts": 7, "moe_intermediate_size": 49, "mlp_only_layers": []}
    model = make_tiny_model(tmp_path, arch="qwen3_moe", tokenizer=False, **sizes)
    found = tokens(load_ranks(model, monkeypatch, tp=2, expert_parallel=True), REQUESTS)
    assert found == tokens(load(model), REQUESTS)


@pytest.mark.parametrize(
    ("arch", "options", "refusal"),
    [
        ("llama", {"tp": 2}, "this model has none"),
        ("mixtral", {}, "ask for --tp 2"),
        ("mixtral", {"pp": 2}, "ask for --tp 2"),
        ("mixtral", {"tp": 4, "num_local_experts": 3}, "4 ranks cannot share 3 experts"),
    ],
)
def test_whole_experts_are_refused_where_there_is_nothing_to_divide(tmp_path, arch, options, refusal):
    sizes = {name: options.pop(name) for name in ("num_local_experts",) if name in options}
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, num_key_value_heads=4, **sizes)
    with pytest.raises(ParallelError, match=refusal):
        load(model, expert_parallel=True, **options)


def test_the_busiest_expert_over_the_mean_of_each_layer():
    assert mean_imbalance([[5, 5, 5, 5], [20, 0, 0, 0]]) == pytest.approx((1 + 4) / 2)
    assert mean_imbalance([[0, 0], [3, 1]]) == pytest.approx(1.5), "a layer without rows tells nothing"
    assert mean_imbalance([[0, 0]]) == 0.0


def counted(holders=((0,), (0,), (1,), (1,))):
    """A layer of four experts, counted before the first request."""
    load_X, load_R = torch.full((4,), 9), torch.full((2,), 9)
    return Mixture((), (), 4, 1, True, load_X=load_X, owners=ExpertOwners(holders, 0, 2, load_R))


WHOLE = ParallelLayout(2, expert_parallel=True)


def test_counters_are_read_at_intervals_from_the_first_request_on():
    layers, now = [counted(), counted(((0,), (0, 1), (1,), (1,)))], [100.0]
    load = ExpertLoad(layers, WHOLE, lambda: now[0])
    layers[0].load_X.add_(torch.tensor([6, 2, 0, 0]))
    layers[1].load_X.add_(torch.tensor([0, 8, 0, 0]))
    for layer, rows in zip(layers, ([8, 0], [4, 4]), strict=True):
        layer.owners.load_R.add_(torch.tensor(rows))
    wanted = {
        "expert_rows": 16,
        "expert_imbalance": (3 + 4) / 2,
        "expert_rank_imbalance": (2 + 1) / 2,
        "expert_rank_imbalance_without_copies": 2.0,
    }
    assert load.stats() == pytest.approx(wanted)
    layers[1].load_X.add_(torch.tensor([8, 0, 0, 0]))
    now[0] += 0.5
    assert load.stats() == pytest.approx(wanted)
    now[0] += 0.5
    assert load.stats()["expert_rows"] == 24


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "quant": "int8", "threads": 2}])
def test_an_engine_counts_all_rows_of_all_layers(tmp_path, monkeypatch, options):
    """Recorded steps count too."""
    model = make_tiny_model(tmp_path, arch="mixtral", tokenizer=False)
    monkeypatch.setattr("llmbox.engine.executor.expert_load.READ_SECONDS", 0.0)
    engine = load(model, **options)
    assert engine.stats().expert_rows == 0
    tokens(engine, [ask("a", range(3, 23), 6), ask("b", [5, 9], 9)])
    stats = engine.stats()
    layers, per_token = 2, 2
    assert stats.expert_rows == (20 + 5 + 2 + 8) * layers * per_token
    assert 1.0 <= stats.expert_imbalance <= 2.0
    assert stats.expert_rank_imbalance == 0.0


def test_ranks_are_compared_where_they_have_whole_experts(tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path, arch="mixtral", tokenizer=False)
    monkeypatch.setattr("llmbox.engine.executor.expert_load.READ_SECONDS", 0.0)
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = load_threads(model, tp=2, expert_parallel=True)
    tokens(engine, [ask("a", range(3, 23), 6)])
    assert 1.0 <= engine.stats().expert_rank_imbalance <= engine.stats().expert_imbalance
