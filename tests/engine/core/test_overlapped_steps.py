"""The next step is launched before the tokens of the last are known: what it may presume, and what not."""

import pytest

from support.fake_runner import expected_output
from support.scheduling import FakeEngine, make_request, scheduled


def overlapping(**options):
    return FakeEngine(depth=1, **options)


def expected(request):
    return expected_output(request.cache_namespace, request.prompt_ids, request.params)


def launched(engine):
    """Tokens by request of each step so far."""
    return [scheduled(plan) for plan in engine.runner.plans]


def test_results_are_taken_after_the_next_launch():
    engine = overlapping()
    request = make_request("a", 10, max_tokens=3)
    engine.add(request)
    engine.step()
    assert (len(engine.runner.plans), engine.answers["a"].token_ids) == (1, [])
    engine.step()
    assert len(engine.runner.plans) == 2
    assert engine.answers["a"].token_ids == expected(request)[:1]


def test_the_end_by_length_is_foreseen():
    engine = overlapping()
    engine.add(make_request("a", 10, max_tokens=3))
    engine.run()
    assert launched(engine) == [{"a": 10}, {"a": 1}, {"a": 1}]


def test_one_token_takes_one_step():
    engine = overlapping()
    request = make_request("a", 10, max_tokens=1)
    engine.add(request)
    assert engine.run()["a"].token_ids == expected(request)
    assert launched(engine) == [{"a": 10}]


def test_the_row_after_a_stop_leaves_no_trace():
    request = make_request("a", 10, max_tokens=30)
    stop = expected(request)[4]
    engine, alone = overlapping(), FakeEngine()
    for one in (engine, alone):
        one.add(make_request("a", 10, max_tokens=30, stop_token_ids=(stop,)))
        one.run()
    assert len(launched(engine)) == len(launched(alone)) + 1
    assert engine.answers == alone.answers
    seen, wanted = engine.engine.stats(), alone.engine.stats()
    assert (seen.output_tokens, seen.slots_used, seen.blocks_used) == (wanted.output_tokens, 0, 0)
    assert seen.blocks_cached == wanted.blocks_cached
    assert engine.scheduler.pool._cache._block_of.keys() == alone.scheduler.pool._cache._block_of.keys()


def test_the_engine_has_work_until_the_surplus_row_is_back():
    request = make_request("a", 10, max_tokens=30)
    stop = expected(request)[0]
    engine = overlapping()
    engine.add(make_request("a", 10, max_tokens=30, stop_token_ids=(stop,)))
    engine.step()
    engine.step()
    assert engine.answers["a"].finish_reason == "stop"
    assert not engine.scheduler.has_work
    assert engine.engine.has_work
    engine.step()
    assert not engine.engine.has_work


def test_blocks_of_an_aborted_request_go_to_another_while_its_step_runs():
    engine = overlapping(num_blocks=4)
    engine.add(make_request("a", 14, max_tokens=3))
    heir = make_request("b", 14, max_tokens=3)
    engine.step()
    engine.abort("a")
    engine.add(heir)
    assert engine.run()["b"].token_ids == expected(heir)


def test_a_preempted_request_draws_its_unknown_token_again():
    engine = overlapping()
    request = make_request("a", 10, max_tokens=6)
    engine.add(request)
    engine.step()
    engine.step()
    engine.scheduler.active.preempt(engine.scheduler._requests["a"])
    assert engine.run()["a"].token_ids == expected(request)
    assert engine.engine.stats().output_tokens == 6


@pytest.mark.parametrize("chunk", [4, 64])
def test_a_fork_waits_until_its_siblings_prompt_is_known_to_be_there(chunk):
    engine = overlapping(token_budget=max(chunk, 8))
    parent, child = make_request("a", range(10), seed=1), make_request("b", range(10), seed=2, fork_of="a")
    engine.add(parent)
    engine.add(child)
    engine.step()
    assert "b" not in launched(engine)[-1]
    answers = engine.run()
    assert answers["a"].token_ids == expected(parent)
    assert answers["b"].token_ids == expected(child)
    assert sum(step.get("b", 0) for step in launched(engine)) < 10 + 7


def test_a_step_waits_for_the_token_that_drafts_follow():
    """And the next one for what they give; as long as nothing repeats, none waits."""
    engine = overlapping(draft_rows=16)
    request = make_request("a", [0, 1, 2, 3, 4, 5] * 3, max_tokens=40, temperature=0.0)
    engine.add(request)
    waits = 0
    while engine.engine.has_work:
        launched_before = len(engine.runner.plans)
        engine.step()
        engine.scheduler.check()
        waits += len(engine.runner.plans) == launched_before
    assert engine.answers["a"].token_ids == expected(request)
    drafted = [row for plan in engine.runner.plans for row in plan.rows if row.drafts]
    assert drafted
    assert waits >= 2 * len(drafted)
    assert engine.engine.stats().drafts == len(drafted)

    plain = overlapping(draft_rows=16)
    plain.add(make_request("a", 10, max_tokens=20, temperature=1.0))
    plain.run()
    assert plain.engine.stats().drafts == 0
    assert plain.runner.most_launched == 2


def test_prompts_wait_for_no_drafts():
    """A step that admits a request is launched while drafts are verified."""
    engine = overlapping(draft_rows=16)
    engine.add(make_request("a", [0, 1, 2, 3, 4, 5] * 3, max_tokens=40, temperature=0.0))
    while not any(row.drafts for plan in engine.runner.plans for row in plan.rows):
        engine.step()
    engine.add(make_request("b", 10, max_tokens=3))
    engine.step()
    assert launched(engine)[-1] == {"b": 10}
    engine.run()
    engine.scheduler.check()


def test_a_step_that_waits_for_drafts_looks_them_up_once(monkeypatch):
    """What was found before the token was known follows it, where the token is the one that was found."""
    engine, asked, found = overlapping(draft_rows=16), [], []
    drafting = engine.scheduler.drafting
    propose = drafting._ngrams.propose

    def noting(wanted):
        proposed = propose(wanted)
        asked.extend(request.num_tokens for request, _ in wanted)
        found.extend(map(bool, proposed.drafts))
        return proposed

    monkeypatch.setattr(drafting._ngrams, "propose", noting)
    request = make_request("a", [0, 1, 2, 3, 4, 5] * 3, max_tokens=40, temperature=0.0)
    engine.add(request)
    engine.run()
    assert engine.answers["a"].token_ids == expected(request)
    first = next(row for plan in engine.runner.plans for row in plan.rows if row.drafts)
    assert first.start in asked, "before its last token was known"
    assert first.start + 1 not in asked
