"""Several steps on their way at once, of different requests: who goes with whom, and what may follow what."""

import pytest

from support.fake_runner import RunnerError, expected_output
from support.scheduling import FakeEngine, make_request, scheduled

PIPELINES = [(2, 1), (2, 2), (3, 2), (3, 3), (4, 3)]
"""(stages, depth): the host has to know all tokens, or the devices know the last."""

each_pipeline = pytest.mark.parametrize(("stages", "depth"), PIPELINES)


def expected(request):
    return expected_output(request.cache_namespace, request.prompt_ids, request.params)


def asked(engine, count, prompt=6, **params):
    requests = [make_request(f"r{number}", prompt, seed=number, **params) for number in range(count)]
    for request in requests:
        engine.add(request)
    return requests


def launched(engine):
    """Tokens by request of each step so far."""
    return [scheduled(plan) for plan in engine.runner.plans]


def names(engine):
    """Of the requests of each step, once all decode and while none has ended."""
    steps = [list(step) for step in launched(engine)]
    return steps[10 : len(steps) // 2]


@each_pipeline
def test_steps_of_different_requests_are_on_their_way_at_once(stages, depth):
    engine = FakeEngine(stages=stages, depth=depth)
    requests = asked(engine, 8, max_tokens=20)
    answers = engine.run()
    assert engine.runner.most_launched == depth + 1
    for request in requests:
        assert answers[request.request_id].token_ids == expected(request)


@each_pipeline
@pytest.mark.parametrize("count", [4, 7, 8])
def test_decoding_requests_are_dealt_out_evenly_and_in_turn(stages, depth, count):
    engine = FakeEngine(stages=stages, depth=depth)
    asked(engine, count, max_tokens=40)
    engine.run()
    steps = names(engine)
    assert len(steps) > 20
    for first in range(len(steps) - stages):
        turn = steps[first : first + stages]
        assert max(map(len, turn)) - min(map(len, turn)) <= 1
        assert sorted(name for step in turn for name in step) == [f"r{number}" for number in range(count)]


def test_steps_even_out_after_requests_have_ended():
    engine = FakeEngine(stages=2, depth=1)
    for number in range(8):
        ends = number in (0, 1, 2)
        engine.add(make_request(f"r{number}", 6, seed=number, max_tokens=6 if ends else 40))
    engine.run()
    sizes = [len(step) for step in launched(engine)]
    assert sizes[-30:-10] in ([2, 3] * 10, [3, 2] * 10)


@pytest.mark.parametrize(("stages", "depth"), [(2, 2), (3, 3)])
def test_no_step_waits_for_one_that_was_launched_just_before(stages, depth):
    """Tokens that the host does not know are those of steps that all stages have had the time for."""
    engine = FakeEngine(stages=stages, depth=depth)
    asked(engine, 5, max_tokens=30)
    distances, last = [], {}
    while engine.engine.has_work:
        before = len(engine.runner.plans)
        known = {name: request.num_tokens for name, request in engine.scheduler._requests.items()}
        engine.step()
        for number, plan in enumerate(engine.runner.plans[before:], before):
            for row in plan.rows:
                name = row.request.request_id
                if row.end > known[name]:
                    distances.append((number, number - last[name]))
                last[name] = number
    settled = [distance for number, distance in distances if 10 < number < 40]
    assert len(settled) > 30
    assert set(settled) == {stages}


@pytest.mark.parametrize(("stages", "depth", "most"), [(3, 2, 1), (3, 3, 2), (1, 1, 2)])
def test_a_lone_request_goes_as_far_ahead_as_on_one_stage(stages, depth, most):
    engine = FakeEngine(stages=stages, depth=depth)
    (request,) = asked(engine, 1, max_tokens=12)
    assert engine.run()["r0"].token_ids == expected(request)
    assert engine.runner.most_launched == most
    assert len(engine.runner.plans) == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_of_one_prompt_follow_each_other(depth):
    """Chunk n + 1 finds the KV of chunk n at each stage, as steps are in order there."""
    engine = FakeEngine(stages=2, depth=depth, token_budget=20)
    (request,) = asked(engine, 1, prompt=35, max_tokens=3)
    engine.step()
    assert launched(engine) == [{"r0": 10}], "stages share the budget"
    engine.step()
    assert launched(engine)[1:] == [{"r0": 10}]
    if depth == 1:
        assert engine.scheduler._requests["r0"].num_computed == 10
    assert engine.run()["r0"].token_ids == expected(request)
    assert [step["r0"] for step in launched(engine)] == [10, 10, 10, 5, 1, 1]


def test_streams_go_on_beside_a_long_prompt():
    engine = FakeEngine(stages=2, depth=1, token_budget=16)
    asked(engine, 4, max_tokens=60)
    for _ in range(6):
        engine.step()
    engine.add(make_request("long", 80, max_tokens=2))
    engine.run()
    with_prompt = [step for step in launched(engine) if step.get("long", 0) > 1]
    assert len(with_prompt) == 14
    assert {len(step) for step in with_prompt} == {3}, "two streams and a chunk"
    assert all(sum(step.values()) <= 8 for step in with_prompt)


def test_who_comes_later_joins_the_smaller_step():
    engine = FakeEngine(stages=2, depth=1)
    asked(engine, 3, max_tokens=40)
    for _ in range(9):
        engine.step()
    engine.add(make_request("late", 6, max_tokens=30))
    engine.run()
    beside = [len(step) for step in launched(engine) if step.get("late") == 1]
    assert beside == [2] * 29


@each_pipeline
def test_what_raises_takes_all_steps_with_it(stages, depth):
    engine = FakeEngine(stages=stages, depth=depth)
    requests = asked(engine, 8, prompt=9, max_tokens=20)
    while len(engine.runner._waiting) < depth:
        engine.step()
    engine.step()
    engine.runner.crash_next_collect = True
    with pytest.raises(RunnerError):
        engine.run()
    stats = engine.engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 8, 0)
    engine.scheduler.check()
    answers = engine.run()
    for request in requests:
        assert answers[request.request_id].token_ids == expected(request)


def test_only_what_came_back_is_found_in_the_prefix_cache():
    engine = FakeEngine(stages=2, depth=1, token_budget=16)
    first, second = make_request("a", range(24), max_tokens=3), make_request("b", range(24), max_tokens=3)
    engine.add(first)
    engine.step()
    engine.add(second)
    engine.step()
    assert launched(engine) == [{"a": 8}, {"a": 8}]
    assert engine.scheduler.pool.has_prefix(engine.scheduler._requests["a"].block_hashes[1])
    assert not engine.scheduler.pool.has_prefix(engine.scheduler._requests["a"].block_hashes[2])
    assert engine.run()["b"].token_ids == expected(second)
