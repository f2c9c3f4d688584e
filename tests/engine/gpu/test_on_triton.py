"""The runner over the Triton kernels in their interpreter, those that only it calls included."""

import pytest

from support.late_device import FakeCapture, device_engine
from support.real_engines import ask, load, run
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on

turn_on()


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
    assert engine._runner._ops.sample is not None
    assert engine._runner._ops.advance is not None
    engine.prepare()  # of four rows: some of them only fill up
    seen = run(engine, requests)
    for name, outputs in expected.items():
        assert [o.token_ids for o in seen[name] if o.token_ids] == [o.token_ids for o in outputs]
    told = [entry for output in seen["drawn"] for entry in output.logprobs or []]
    wanted = [entry for output in expected["drawn"] for entry in output.logprobs or []]
    assert [entry.logprob for entry in told] == pytest.approx([e.logprob for e in wanted], abs=1e-4)
    assert [entry.rank for entry in told] == [entry.rank for entry in wanted]
    assert capture.replays > 0
