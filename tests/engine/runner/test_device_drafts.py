"""Drafts where steps are launched ahead: the tokens and log-probabilities of steps without, bit by bit."""

import pytest

from engine.core.speculation.test_speculation import OPTIONS, mixed, told
from support.grammars import learned
from support.late_device import device_engine
from support.real_engines import draft_at_no_price, load, run
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    draft_at_no_price(monkeypatch)


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_request_gets_is_the_same(model, name):
    requests = mixed()
    expected = run(learned(device_engine(model, **OPTIONS[name])), requests)
    engine = learned(device_engine(model, speculate="on", **OPTIONS[name]))
    seen = run(engine, requests)
    stats = engine.stats()
    print(stats.steps, stats.drafts, stats.draft_tokens, stats.accepted_tokens)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine._scheduler.check()
    assert stats.draft_tokens > stats.accepted_tokens > 0
