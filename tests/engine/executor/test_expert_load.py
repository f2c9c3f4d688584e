"""How unevenly rows choose experts: counted by the layers, read at intervals."""

import pytest
import torch

from llmbox.engine.executor.expert_load import ExpertLoad, mean_imbalance
from support.rank_threads import load_threads
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model


def test_the_busiest_expert_over_the_mean_of_each_layer():
    assert mean_imbalance([[5, 5, 5, 5], [20, 0, 0, 0]]) == pytest.approx((1 + 4) / 2)
    assert mean_imbalance([[0, 0], [3, 1]]) == pytest.approx(1.5), "a layer without rows tells nothing"
    assert mean_imbalance([[0, 0]]) == 0.0


def test_counters_are_read_at_intervals_from_the_first_request_on():
    loads, now = [torch.tensor([9, 9, 9, 9]), torch.tensor([9, 9, 9, 9])], [100.0]
    load = ExpertLoad(loads, [range(2), range(2, 4)], lambda: now[0])
    loads[0] += torch.tensor([6, 2, 0, 0])
    loads[1] += torch.tensor([2, 2, 2, 2])
    wanted = {"expert_rows": 16, "expert_imbalance": 2.0, "expert_rank_imbalance": 1.5}
    assert load.stats() == pytest.approx(wanted)
    loads[1] += torch.tensor([8, 0, 0, 0])
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
