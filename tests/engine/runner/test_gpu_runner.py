"""The runner for devices against the one that works while called: same tokens, whatever is asked for."""

import random

import pytest
import torch

from llmbox.engine.core.step import SyncExecutor
from llmbox.engine.runner.gpu_runner import GPUModelRunner
from support.late_device import FakeCapture, LateDevice, device_engine
from support.mixes import drawn, told
from support.no_questions import NoQuestions
from support.real_engines import ask, load, run, tokens
from support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False)


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")


@pytest.mark.parametrize(("seed", "graphs"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_running": 3, "token_budget": 9},
        {"kv_tokens": 112, "context": 80, "block_size": 4},
        {"prefix_cache": False, "chunked_prefill": False},
    ],
    ids=["plain", "chunks", "preempted", "no cache"],
)
def test_same_answers(model, options, seed, graphs):
    rng = random.Random(seed)
    requests = [drawn(rng, number) for number in range(12)]
    capture = FakeCapture() if graphs else None
    engine = device_engine(model, capture=capture, **options)
    if graphs:
        while engine.executor.prepare():
            pass
    expected, seen = run(load(model, **options), requests), run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0
    assert engine.stats().output_tokens == sum(len(told(outputs)[0]) for outputs in seen.values())
    if graphs:
        assert capture.replays > 10


def test_preempted_requests_go_on_exactly(model):
    options = {"kv_tokens": 112, "context": 80, "block_size": 4}
    requests = [ask(f"r{n}", range(n + 3, n + 23), 40, temperature=0.9, seed=n) for n in range(4)]
    engine = device_engine(model, **options)
    expected, seen = run(load(model, **options), requests), run(engine, requests)
    assert {n: told(o)[0] for n, o in seen.items()} == {n: told(o)[0] for n, o in expected.items()}
    assert engine.stats().preemptions > 0


def test_the_next_step_is_launched_before_results_are_waited_for(model):
    device = LateDevice()
    engine = device_engine(model, device)
    engine.add(ask("a", range(5, 30), 4))
    engine.step()
    assert device.waits == 0
    engine.step()
    assert device.waits == 1
    assert len(engine._launched) == 1


@pytest.mark.parametrize("budget", [8, 200], ids=["chunks", "whole"])
@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs_come_as_late_as_tokens(model, budget, top):
    """A chunk that draws nothing has them to tell, a whole prompt more than are computed at once."""
    options = {"token_budget": budget, "max_running": 3}
    requests = [
        ask("short", [7, 5, 9], 3, prompt_logprobs=top),
        ask("long", range(3, 103), 3, prompt_logprobs=top),
        ask("silent", range(9, 30), 3),
    ]
    device, questions = LateDevice(), NoQuestions()
    engine = device_engine(model, device, **options)
    runner = engine.executor
    runner._forward = questions.but_for(runner._forward)  # the reference's attention looks
    runner._model.hidden = questions.but_for(runner._model.hidden)
    runner.launch_sized = questions.during(runner.launch_sized)
    expected, seen = run(load(model, **options), requests), run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])
    assert device.waits == engine.stats().steps


def test_rules_that_read_the_last_token_find_it_on_the_device(model):
    """Four tokens are all there is, so that every rule bites; the last one is never known at a launch."""
    rules = {"allowed_token_ids": (20, 21, 22, 23), "temperature": 1.0}
    words = (*((a, b, c) for a in (20, 21) for b in (21, 22) for c in (20, 23)), (22, 21), (23, 21))
    requests = [
        ask("repetition", [5, 20, 7], 30, repetition_penalty=1.7, seed=1, **rules),
        ask("presence", [5, 6, 7], 30, presence_penalty=1.1, frequency_penalty=0.3, seed=2, **rules),
        ask("words", [5, 6, 20], 30, bad_words=words, seed=3, **rules),
        ask("all", [5, 6, 20], 30, bad_words=words, frequency_penalty=0.4, seed=4, **rules),
    ]
    engine, expected = device_engine(model), run(load(model), requests)
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id])
    assert engine.stats().steps == 30
    without = [ask(r.request_id, r.prompt_ids, 30, seed=r.params.seed, **rules) for r in requests]
    free = tokens(load(model), without)
    assert all(told(seen[name])[0] != free[name] for name in free), "the rules had nothing to say"


def test_idle_means_nothing_is_launched(model):
    device = LateDevice()
    engine = device_engine(model, device)
    run(engine, [ask("a", [5, 6, 7], 8)])
    assert not engine.has_work
    assert device.under_way == []
    before = device.waits
    engine.step()
    assert (device.under_way, device.waits) == ([], before)


def test_a_broken_row_fails_alone(model):
    engine = device_engine(model)
    table = engine.executor._model.embedding.packed.weight_OI
    with torch.inference_mode():
        table[300] = torch.nan
    good = ask("good", [5, 6, 7], 6)
    outputs = run(engine, [good, ask("bad", [5, 300, 7], 6, prompt_logprobs=2)])
    assert outputs["bad"][-1].error_code == "invalid_logits"
    assert "NaN" in outputs["bad"][-1].error_message
    again = run(engine, [ask(f"again{n}", range(5, 60), 6) for n in range(20)])
    assert all(found[-1].finish_reason == "length" for found in again.values())
    assert outputs["good"][-1].finish_reason == "length"


def test_rows_are_reused_by_later_requests(model):
    options = {"max_running": 2, "token_budget": 32}
    requests = [ask(f"r{n}", range(n + 3, n + 20), 5, temperature=0.9, seed=n) for n in range(9)]
    engine = device_engine(model, **options)
    expected, seen = run(load(model, **options), requests), run(engine, requests)
    assert {n: told(o)[0] for n, o in seen.items()} == {n: told(o)[0] for n, o in expected.items()}
    assert len(engine.executor._rows._held) <= 2


def test_the_loader_makes_it_where_it_is_asked_for(model):
    requests = [ask(f"r{n}", range(n + 3, n + 20), 8, temperature=0.9, seed=n) for n in range(3)]
    engine, plain = load(model, overlap=True), load(model)
    assert isinstance(engine.executor, GPUModelRunner)
    assert isinstance(plain.executor, SyncExecutor)
    assert tokens(engine, requests) == tokens(plain, requests)
    assert engine.prepare() is False
