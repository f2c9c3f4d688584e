"""What kinds of models there are, on ranks that launch steps ahead: the tokens of one rank alone."""

from itertools import product

import pytest

from support.device_ranks import device_ranks
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

MODELS = {
    "experts": {"arch": "qwen3_moe"},
    "experts in every layer": {"arch": "mixtral", "num_hidden_layers": 2},
    "tied head, odd vocabulary": {"arch": "qwen2", "tie_word_embeddings": True, "vocab_size": 321},
    "one KV head": {"arch": "qwen3", "num_key_value_heads": 1},
    "window": {"arch": "mistral", "sliding_window": 24, "vocab_size": 323},
    "stacked tensors, heads that turn in part": {"arch": "phi3", "partial_rotary_factor": 0.5},
    "layers that do not turn": {"arch": "smollm3", "num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "biases": {"arch": "llama", "attention_bias": True, "mlp_bias": True},
}
CUTS = {
    "tp 2, sums and norms in one": ({"tp": 2}, 8),
    "tp 4": ({"tp": 4}, 0),
    "pp 2": ({"pp": 2}, 0),
    "tp 2, pp 2": ({"tp": 2, "pp": 2}, 8),
}
REQUESTS = [
    ask("long", range(3, 43), 6),
    ask("short", [5, 9, 11], 6, temperature=0.8, seed=3),
    ask("cut", range(7, 30), 6, temperature=0.9, top_k=9, top_p=0.9, seed=5),
    ask("ruled", range(7, 20), 6, temperature=0.9, repetition_penalty=1.2, logprobs=2, seed=7),
]


WHOLE_EXPERTS = {
    "tp 2, whole experts, sums and norms in one": ({"tp": 2, "expert_parallel": True}, 8),
    "tp 4, whole experts": ({"tp": 4, "expert_parallel": True}, 0),
}


@pytest.mark.parametrize(
    ("kind", "cut"),
    [*product(MODELS, CUTS), ("experts", "tp 4, whole experts"), *product(list(MODELS)[1:2], WHOLE_EXPERTS)],
)
def test_tokens_are_those_of_one_rank(tmp_path, monkeypatch, kind, cut):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    sizes, fused_rows = (CUTS | WHOLE_EXPERTS)[cut]
    model = make_tiny_model(tmp_path, tokenizer=False, **MODELS[kind])
    options = {"max_running": 4, "token_budget": 16}
    expected = tokens(load(model, **options), REQUESTS)
    with device_ranks(model, graphs=True, fused_rows=fused_rows, **sizes, **options) as (engine, ranks):
        while engine.prepare():
            pass
        assert tokens(engine, REQUESTS) == expected
    assert all((rank.collective.fused > 0) == (fused_rows > 0) for rank in ranks)
    assert all(rank.capture is not None and rank.capture.replays > 0 for rank in ranks)
