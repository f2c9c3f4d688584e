"""The engine's loop over a fake model: answers, refusals, statistics, and what an exception leaves behind."""

import pytest

from support.fake_runner import RunnerError, expected_output
from support.scheduling import FakeEngine, make_request


def expected(request):
    return expected_output(request.cache_namespace, request.prompt_ids, request.params)


def test_one_request_from_add_to_finish():
    engine = FakeEngine()
    request = make_request("a", 10, max_tokens=5)
    engine.add(request)
    answer = engine.run()["a"]
    assert answer.token_ids == expected(request)
    assert answer.finish_reason == "length"
    assert len(answer.outputs) == 5


def test_refusal_is_an_error_output():
    engine = FakeEngine(context=20)
    engine.add(make_request("a", 15, max_tokens=10))
    (output,) = engine.answers["a"].outputs
    assert (output.finish_reason, output.error_code) == ("error", "does_not_fit")
    assert "25" in output.error_message
    assert not engine.engine.has_work


@pytest.mark.parametrize(
    ("output", "params", "reason"),
    [([1, 2], {"max_tokens": 2}, "length"), ([1, 9], {"stop_token_ids": (9,)}, "stop")],
)
def test_resuming_what_was_complete_ends_at_once(output, params, reason):
    engine = FakeEngine()
    engine.add(make_request("a", 5, output=output, **params))
    assert engine.answers["a"].finish_reason == reason
    assert not engine.engine.has_work


def test_abort_answers_once():
    engine = FakeEngine()
    engine.add(make_request("a", 5))
    engine.step()
    assert engine.engine.abort("a").finish_reason == "abort"
    assert engine.engine.abort("a") is None
    assert engine.engine.stats().blocks_used == 0


def test_idle_step_does_nothing():
    engine = FakeEngine()
    outputs = engine.engine.step()
    assert outputs.outputs == []
    assert outputs.stats.steps == 0
    assert engine.runner.plans == []


def test_stats():
    engine = FakeEngine(max_running=1)
    engine.add(make_request("a", range(10), max_tokens=3))
    engine.add(make_request("b", range(10), max_tokens=3))
    engine.step()
    stats = engine.engine.step().stats
    assert (stats.running, stats.waiting, stats.steps) == (1, 1, 2)
    assert (stats.blocks_total, stats.blocks_used, stats.blocks_cached) == (100, 3, 0)
    assert (stats.prompt_tokens, stats.output_tokens, stats.slots_used) == (10, 2, 11)
    engine.run()
    stats = engine.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)
    assert (stats.prompt_tokens, stats.output_tokens, stats.preemptions) == (20, 6, 0)


def test_exception_in_a_step_is_raised_and_leaves_nothing_that_lies():
    engine = FakeEngine(token_budget=8)
    request = make_request("a", range(20), max_tokens=6)
    engine.add(request)
    engine.step()
    engine.runner.crash_next = True
    with pytest.raises(RunnerError):
        engine.step()
    stats = engine.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_cached) == (0, 1, 0, 0)
    engine.scheduler.check()
    assert engine.run()["a"].token_ids == expected(request)


def test_exception_in_the_step_that_forks():
    engine = FakeEngine()
    parent = make_request("a", range(10), seed=1)
    child = make_request("b", range(10), seed=2, fork_of="a")
    engine.add(parent)
    engine.add(child)
    engine.step()
    engine.runner.crash_next = True
    with pytest.raises(RunnerError):
        engine.step()
    answers = engine.run()
    assert answers["a"].token_ids == expected(parent)
    assert answers["b"].token_ids == expected(child)


def test_not_a_number_fails_one_request_and_nobody_else():
    engine = FakeEngine()
    good, bad = make_request("good", range(12)), make_request("bad", range(12))
    engine.add(good)
    engine.step()
    engine.add(bad)
    engine.runner.poisoned.add("bad")
    answers = engine.run()
    assert answers["bad"].finish_reason == "error"
    assert answers["bad"].outputs[-1].error_code == "invalid_logits"
    assert answers["good"].token_ids == expected(good)
