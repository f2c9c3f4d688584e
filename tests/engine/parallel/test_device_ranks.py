"""Ranks that launch steps ahead against one that takes them in turn: same tokens, whatever is asked for."""

import random

import pytest

from support.device_ranks import device_ranks
from support.mixes import drawn, told
from support.real_engines import ask, load, run, tokens
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False, num_hidden_layers=3)


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")


CUTS = [{"tp": 2}, {"pp": 2}, {"pp": 3}, {"tp": 2, "pp": 2}]
MIXES = {
    "plain": {},
    "chunks": {"max_running": 3, "token_budget": 9},
    "preempted": {"kv_tokens": 112, "context": 80, "block_size": 4},
    "no cache": {"prefix_cache": False, "chunked_prefill": False},
}


def compare(model, cut, options, seed, graphs):
    rng = random.Random(seed)
    requests = [drawn(rng, number) for number in range(12)]
    expected = run(load(model, **options), requests)
    with device_ranks(model, graphs=graphs, **cut, **options) as (engine, ranks):
        while graphs and engine.prepare():
            pass
        seen = run(engine, requests)
        engine._scheduler.check()
        assert engine._scheduler.pool.num_used == 0
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])
    if graphs:
        assert {rank.capture.replays for rank in ranks} == {ranks[0].capture.replays}
        assert ranks[0].capture.replays > 10
    return engine


@pytest.mark.parametrize(("seed", "graphs"), [(0, False), (1, True)])
@pytest.mark.parametrize("options", MIXES.values(), ids=MIXES)
def test_same_answers_from_shared_layers(model, options, seed, graphs):
    compare(model, {"tp": 2}, options, seed, graphs)


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
@pytest.mark.parametrize("mix", ["chunks", "preempted"])
def test_same_answers_from_stages(model, cut, mix):
    compare(model, cut, MIXES[mix], 3, graphs=True)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_preempted_requests_and_shared_prefixes_go_on_exactly(model, cut):
    options = {"kv_tokens": 112, "context": 80, "block_size": 4}
    requests = [ask(f"r{n}", [*range(3, 15), n], 40, temperature=0.9, seed=n) for n in range(5)]
    expected = tokens(load(model, **options), requests)
    with device_ranks(model, **cut, **options) as (engine, _):
        assert tokens(engine, requests) == expected
        assert engine.stats().preemptions > 0
        assert tokens(engine, requests) == expected
        assert engine.stats().prefix_hits > 0
