"""The runner over the Triton kernels in their interpreter, those that only it calls included."""

from collections import Counter

import pytest

from support.families import make_family
from support.lanes import nightly
from support.late_device import FakeCapture, device_engine
from support.real_engines import ask, load, run, tokens
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on

turn_on()

from llmbox.engine.runner.cuda_graphs import DecodeGraphs

SLIDING, FULL = "sliding_attention", "full_attention"
FAMILY_SIZES = [
    (
        "gemma4_text",
        {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
            "num_kv_shared_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 10,
        },
    ),
    ("deepseek_v2", {"num_hidden_layers": 2}),
    ("llama4_text", {"num_hidden_layers": 2, "moe_layers": [1], "attention_chunk_size": 9}),
    (
        "qwen3_5_text",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", FULL],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    *(nightly(arch, {}) for arch in ("qwen3_next", "granitemoehybrid", "nemotron_h", "falcon_h1", "bamba")),
    *(nightly(arch, {}) for arch in ("olmo_hybrid", "lfm2", "lfm3", "kimi_linear", "mamba2")),
    *(nightly(arch, {}) for arch in ("jamba", "falcon_mamba", "bailing_hybrid", "bitnet", "nanochat")),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of rows that only fill up
def test_tokens_are_those_of_the_reference(tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, vocab_size=99)
    requests = [
        ask("greedy", range(5, 24), 3),
        ask("drawn", [7, 8, 9], 4, temperature=0.9, top_p=0.8, seed=3, logprobs=2),
        ask("ruled", [7, 8], 3, temperature=1.2, top_k=7, seed=9, repetition_penalty=1.5),
    ]
    options = {"dtype": "float32", "max_running": 4, "token_budget": 64}
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = run(load(model, **options), requests)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    capture = FakeCapture()
    engine = device_engine(model, capture=capture, **options)
    assert engine.executor._ops.sample is not None
    assert engine.executor._ops.prepare_decode_inputs is not None
    engine.prepare()  # of four rows: some of them only fill up
    seen = run(engine, requests)
    for name, outputs in expected.items():
        assert [o.token_ids for o in seen[name] if o.token_ids] == [o.token_ids for o in outputs]
    told = [entry for output in seen["drawn"] for entry in output.logprobs or []]
    wanted = [entry for output in expected["drawn"] for entry in output.logprobs or []]
    assert [entry.logprob for entry in told] == pytest.approx([e.logprob for e in wanted], abs=1e-4)
    assert [entry.rank for entry in told] == [entry.rank for entry in wanted]
    assert capture.replays > 0


@pytest.mark.filterwarnings("ignore:.*encountered in")
@pytest.mark.parametrize(("arch", "sizes"), FAMILY_SIZES)
def test_families_give_the_tokens_of_the_reference(tmp_path, monkeypatch, arch, sizes):
    """In chunks, in a batch, and by graphs that rows fill up."""
    model = make_family(tmp_path, arch, vocab_size=99, **sizes)
    requests = [ask("a", range(3, 21), 2), ask("b", [5, 9], 2)]
    options = {"dtype": "float32", "max_running": 3, "token_budget": 16}
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = tokens(load(model, **options), requests)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    capture = FakeCapture()
    engine = device_engine(model, capture=capture, **options)
    engine.prepare()
    assert tokens(engine, requests) == expected
    assert capture.replays > 0


@pytest.mark.slow
def test_penalties_go_on_exactly_after_a_preemption(tmp_path, monkeypatch):
    """The device counts ahead of the host; a request that runs again is counted anew."""
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, vocab_size=99)
    rules = [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "frequency_penalty": 1.5, "bad_words": ((5,), (6, 7))},
        {"temperature": 0.8, "repetition_penalty": 1.2, "min_tokens": 4, "stop_token_ids": (11,)},
    ]
    requests = [ask(f"r{n}", [*range(3, 9), n + 20], 14, seed=n, **each) for n, each in enumerate(rules)]
    sizes = {"max_running": 3, "token_budget": 16, "kv_tokens": 56, "context": 40, "block_size": 4}
    options = {"dtype": "float32", **sizes}
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = tokens(load(model, **options), requests)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    engine = device_engine(model, **options)
    assert tokens(engine, requests) == expected
    assert engine.stats().preemptions > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_draws_in_graphs_are_those_beside_them(tmp_path, monkeypatch):
    """Through a preemption and an abort, with neighbors whose rules keep whole steps out of these graphs."""
    model = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1, vocab_size=99)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    draws = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.8, "repetition_penalty": 1.2},
    ]
    requests = [ask(f"r{n}", [*range(3, 9), n + 20], 14, seed=n, **each) for n, each in enumerate(draws)]
    sizes = {"max_running": 3, "token_budget": 16, "kv_tokens": 44, "context": 40, "block_size": 4}

    def answer(capture):
        engine = device_engine(model, capture=capture, dtype="float32", **sizes)
        while engine.prepare():
            pass
        assert engine.add(ask("gone", range(3, 12), 20, temperature=1.0)) is None
        for _ in range(4):
            engine.step()
        assert engine.abort("gone") is not None
        answers = tokens(engine, requests)
        assert engine.stats().preemptions > 0
        engine.scheduler.check()
        return answers

    expected, replays = answer(None), Counter()
    replay, replay_draw = DecodeGraphs.replay, DecodeGraphs.replay_draw
    monkeypatch.setattr(
        DecodeGraphs, "replay", lambda self, size: (replays.update(["steps"]), replay(self, size))
    )
    monkeypatch.setattr(
        DecodeGraphs, "replay_draw", lambda self, size: (replays.update(["draws"]), replay_draw(self, size))
    )
    assert answer(FakeCapture()) == expected
    assert 3 < replays["draws"] < replays["steps"]
