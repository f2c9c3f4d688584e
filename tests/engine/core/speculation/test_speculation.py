"""Drafts never change what a request gets: tokens, log-probabilities, ends; bit by bit on C++ kernels."""

import random
from typing import Any

import pytest

from llmbox.engine.core.engine import Engine
from llmbox.engine.errors import DeviceError
from llmbox.engine.hardware.proc import finish
from llmbox.engine.ipc.messages import AddRequest, RequestOutput
from support.grammars import CHOICE, JSON, REGEX, constrained, learned, wrapped
from support.mixes import drawn
from support.real_engines import ask, draft_at_no_price, load, run
from support.tiny_models import make_tiny_model

ROWS = 64
"""Of a step with drafts, whatever this machine can."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "cpu")
    draft_at_no_price(monkeypatch)


def engine_with(model, speculate: str, **options: Any) -> Engine:
    engine = learned(load(model, speculate=speculate, **options))
    if speculate == "on":
        assert engine.scheduler.drafting._rows > 0
        engine.scheduler.drafting._rows = ROWS
    return engine


def told(outputs: list[RequestOutput]) -> tuple[object, ...]:
    """All that a client sees, but when; log-probabilities to the last bit."""
    return (
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs or []],
        [entry for output in outputs for entry in output.prompt_logprobs or []],
        outputs[-1].finish_reason,
        outputs[-1].stop_token_id,
        outputs[-1].error_code,
    )


def repeating(number: int) -> AddRequest:
    """Few ids to choose from, so that a guess comes true now and then, in any way of drawing."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.1, "logprobs": 2},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 0.8, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        {"temperature": 1.0, "top_p": 0.9, "bad_words": ((21, 22), (20, 20, 20))},
        {"temperature": 0.7, "top_k": 2, "logit_bias": {21: 0.5}},
        {"temperature": 1.0, "stop_token_ids": (22,), "min_tokens": 9},
        {"temperature": 1.0, "min_p": 0.2, "logprobs": 3, "prompt_logprobs": 1},
    ]
    few = {} if number % 8 == 0 else {"allowed_token_ids": (20, 21, 22)}
    return ask(
        f"few{number}", [20, 21, 22, 21, 5 + number % 3] * 3, 60, seed=number, **few, **ways[number % 8]
    )


def mixed() -> list[AddRequest]:
    rng = random.Random(7)
    grammars = [
        constrained(f"grammar{n}", grammar, seed=n, prompt=range(5, 40))
        for n, grammar in enumerate([JSON, REGEX, CHOICE, JSON])
    ]
    return [*(repeating(number) for number in range(16)), *(drawn(rng, n) for n in range(8)), *grammars]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alone": {"max_running": 1},
    "chunks": {"max_running": 3, "token_budget": 25},
    "preempted": {"kv_tokens": 260, "context": 200, "block_size": 4},
    "no cache": {"prefix_cache": False, "chunked_prefill": False},
    "bf16": {"dtype": "bfloat16"},
    "bf16, int8 keys": {"dtype": "bfloat16", "kv_dtype": "int8", "max_running": 2},
    "int8": {"dtype": "bfloat16", "quant": "int8", "max_running": 2},
    "int4": {"quant": "int4", "max_running": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_request_gets_is_the_same(model, name):
    requests = mixed()
    expected = run(engine_with(model, "off", **OPTIONS[name]), requests)
    engine = engine_with(model, "on", **OPTIONS[name])
    seen = run(engine, requests)
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    engine.scheduler.check()
    stats = engine.stats()
    assert engine.scheduler.pool.num_used == 0
    assert stats.output_tokens == sum(len(told(outputs)[0]) for outputs in seen.values())
    assert stats.draft_tokens > stats.accepted_tokens > 0, "both ways were taken"
    assert stats.draft_methods["grammar"].accepted_tokens > 0
    if name == "preempted":
        assert stats.preemptions > 0


@pytest.mark.parametrize("arch", ["qwen3_moe", "gemma3_text"])
def test_other_layers_draw_the_same(tmp_path, arch):
    """Which experts a row goes to is its own affair, and so are the tokens that its window has."""
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False)
    requests = [repeating(number) for number in range(16)]
    expected, engine = run(engine_with(model, "off"), requests), engine_with(model, "on")
    seen = run(engine, requests)
    assert {name: told(each) for name, each in seen.items()} == {n: told(o) for n, o in expected.items()}
    assert engine.stats().accepted_tokens > 0


def test_a_repeating_answer_takes_fewer_steps(model):
    engine = engine_with(model, "on")
    request = ask("a", [5, 6, 7] * 4, 64, logit_bias={9: 100.0})
    outputs = run(engine, [request])["a"]
    assert told(outputs)[0] == [9] * 64
    stats = engine.stats()
    assert stats.steps < 16
    assert stats.steps + stats.accepted_tokens == 64
    assert max(len(output.token_ids) for output in outputs) > 8


@pytest.mark.parametrize("masks_ahead", [False, True])
def test_a_grammars_fixed_text_takes_fewer_steps(model, masks_ahead):
    """Nothing of it stood before. A model may write it in other tokens; this one takes the longest.
    `masks_ahead`: the runner gets the masks after drafts with the step, as workers do.
    """
    word = wrapped({"lark_grammar": 'start: "the answer is " /[01]{3}/ " of the answers"'})
    plain, engine = engine_with(model, "off"), engine_with(model, "on")
    engine._masks_ahead = masks_ahead
    request = constrained("a", word)
    outputs = run(engine, [request])["a"]
    assert told(outputs) == told(run(plain, [request])["a"])
    counts = engine.stats().draft_methods["grammar"]
    assert counts.accepted_tokens == counts.draft_tokens > 20
    assert engine.stats().steps + engine.stats().accepted_tokens == len(told(outputs)[0])
    assert engine.stats().steps < plain.stats().steps / 3


@pytest.mark.parametrize("cut", [3, 9])
def test_a_request_that_another_engine_resumes_goes_on_exactly(model, cut):
    """As after a kill: what was told is all that is left of it."""
    requests = mixed()
    expected = run(engine_with(model, "off"), requests)
    first, second = engine_with(model, "on"), engine_with(model, "on", token_budget=32)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert first.add(request) is None
    for _ in range(cut):
        for output in first.step().outputs:
            outputs[output.request_id].append(output)
    for request in requests:
        so_far = outputs[request.request_id]
        if so_far and so_far[-1].finish_reason is not None:
            continue
        ids = [token for output in so_far for token in output.token_ids]
        second.add(
            AddRequest(
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                params=request.params,
                output_ids=ids,
            )
        )
    while second.has_work:
        for output in second.step().outputs:
            outputs[output.request_id].append(output)
    for request in requests:
        name = request.request_id
        assert told(outputs[name])[0] == told(expected[name])[0]
        assert told(outputs[name])[3:] == told(expected[name])[3:]


def test_a_guess_that_breaks_the_numbers_breaks_no_answer(model):
    """NaN in a draft's row: the request is computed again, without drafts."""
    engine, plain = engine_with(model, "on"), engine_with(model, "off")
    runner = engine.executor.runner
    hidden = runner._model.hidden
    breaking = []

    def broken_hidden(forward, wanted_R):
        states_RE = hidden(forward, wanted_R)
        if wanted_R is None and len(states_RE) > 1 and not breaking:
            breaking.append(True)
            states_RE = states_RE.clone()
            states_RE[-1, 0] = float("nan")
        return states_RE

    runner._model.hidden = broken_hidden
    request = ask("a", [5, 6, 7] * 4, 30, logit_bias={9: 100.0})
    seen = run(engine, [request])["a"]
    assert breaking
    assert told(seen) == told(run(plain, [request])["a"])
    assert engine.stats().draft_tokens == 0
    engine.scheduler.check()


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}], ids=["shards", "stages"])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5_text"])
@pytest.mark.slow
def test_ranks_verify_drafts_as_one_process_does(tmp_path, arch, ranks):
    """Recurrent layers go back to the state before a wrong one, workers get the masks after drafts with the
    step, and stages verify drafts of other requests at the same time.
    """
    model, requests = make_tiny_model(tmp_path, arch=arch, tokenizer=False), mixed()
    expected = run(engine_with(model, "off", **ranks), requests)
    engine = engine_with(model, "on", **ranks)
    seen = run(engine, requests)
    finish()
    for request in requests:
        assert told(seen[request.request_id]) == told(expected[request.request_id]), request
    stats = engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 0
    assert stats.draft_methods["grammar"].accepted_tokens > 0
    engine.scheduler.check()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"pp": 2, "overlap": True}, "launch steps ahead"), ({}, "may compute a row differently")],
    ids=["stages", "kernels"],
)
def test_asked_for_where_it_cannot_be_is_refused(model, options, reason, monkeypatch):
    if not options:
        monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    with pytest.raises(DeviceError, match=f"speculate was requested.*{reason}.*--speculate auto"):
        load(model, speculate="on", **options)


def test_auto_does_without_where_it_cannot_be(model, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = load(model)
    run(engine, [ask("a", [5, 6, 7] * 4, 30, logit_bias={9: 100.0})])
    assert engine.stats().drafts == 0
