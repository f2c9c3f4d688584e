"""Experts cut over ranks: the tokens of one process."""

import pytest

from llmbox.engine.errors import ParallelError
from support.rank_threads import load_ranks
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
