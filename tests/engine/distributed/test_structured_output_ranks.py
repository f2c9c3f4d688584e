"""Ranks are told what a grammar lets come next: all of them draw as one does."""

import pytest

from support.device_ranks import device_ranks
from support.grammars import CHOICE, JSON, REGEX, constrained, learned
from support.mixes import told
from support.real_engines import ask, load, run
from support.tiny_models import make_tiny_model


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_answers_are_those_of_one_rank(tmp_path, cut, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    model = make_tiny_model(tmp_path, tokenizer=False)
    requests = [
        constrained("json", JSON, seed=1),
        constrained("regex", REGEX, seed=2, logprobs=2, repetition_penalty=1.2),
        constrained("greedy", CHOICE, temperature=0.0),
        ask("free", range(5, 12), 12, temperature=0.9, seed=3),
        constrained("ranked", JSON, 20, seed=4, top_k=9, prompt=range(5, 30)),
    ]
    options = {"max_running": 4, "token_budget": 16}
    expected = run(learned(load(model, **options)), requests)
    with device_ranks(model, **cut, **options) as (engine, _):
        seen = run(learned(engine), requests)
    assert {name: told(outputs) for name, outputs in seen.items()} == {
        name: told(outputs) for name, outputs in expected.items()
    }
