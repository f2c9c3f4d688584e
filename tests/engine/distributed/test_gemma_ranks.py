"""Norms behind attention and MLP, a scaled and cut embedding, capped logits: the tokens of one process."""

from typing import Any

import pytest

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
        ("gemma2", {"tp": 2}, {}),
        ("gemma3_text", {"pp": 2}, {"dtype": "bfloat16", "quant": "int8"}),
        ("gemma3_text", {"tp": 2}, {}),
    ],
)
def test_ranks_give_the_tokens_of_one(
    tmp_path, monkeypatch, arch: str, cut: dict[str, int], options: dict[str, Any]
):
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False)
    found = tokens(load_ranks(model, monkeypatch, **cut, **options), REQUESTS)
    assert found == tokens(load(model, **options), REQUESTS)
