"""Far too many requests for a tiny pool: everyone finishes, nobody is preempted more than four times."""

import random

import pytest

from llmbox.engine.core.kv_cache.manager import MAX_PREEMPTIONS
from support.fake_runner import expected_output
from support.scheduling import FakeEngine, make_request


def crowd(engine, rng, count=64):
    """Long requests: each one alone takes between half and all of eight blocks of four."""
    requests = []
    for number in range(count):
        prompt = rng.randrange(1, 20)
        request = make_request(
            f"r{number}",
            prompt,
            priority=rng.choice([-1, 0, 0, 0, 5]),
            max_tokens=rng.randrange(16 - min(prompt, 15), 33 - prompt),
            seed=number,
        )
        engine.add(request)
        requests.append(request)
    return requests


def preemptions_of(engine, seen):
    for request in engine.scheduler._requests.values():
        seen[request.request_id] = max(seen.get(request.request_id, 0), request.preemptions)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("config", [{}, {"cache": False}, {"premium_share": 0.25, "watermark": 0.2}])
def test_eight_blocks_and_64_long_requests_all_finish(seed, config):
    rng = random.Random(seed)
    engine = FakeEngine(num_blocks=8, block_size=4, token_budget=16, **config)
    requests = crowd(engine, rng)
    seen = {}
    while engine.engine.has_work:
        before = len(engine.runner.plans)
        engine.step()
        preemptions_of(engine, seen)
        assert len(engine.runner.plans) > before, "work is left, but nothing was scheduled"
    engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0
    assert max(seen.values()) <= MAX_PREEMPTIONS
    for request in requests:
        expected = expected_output("", request.prompt_ids, request.params)
        assert engine.answers[request.request_id].token_ids == expected


@pytest.mark.parametrize("seed", range(10))
def test_random_aborts_of_30_percent_change_nobody_else(seed):
    rng = random.Random(seed)
    engine = FakeEngine(num_blocks=8, block_size=4, token_budget=16)
    requests = crowd(engine, rng)
    doomed = [request.request_id for request in requests if rng.random() < 0.3]
    rng.shuffle(doomed)
    while engine.engine.has_work:
        engine.step()
        if doomed and rng.random() < 0.2:
            engine.abort(doomed.pop())
            engine.scheduler.check()
    assert engine.scheduler.pool.num_used == 0
    aborted = 0
    for request in requests:
        answer = engine.answers[request.request_id]
        expected = expected_output("", request.prompt_ids, request.params)
        assert answer.token_ids == expected[: len(answer.token_ids)]
        aborted += answer.finish_reason == "abort"
        assert answer.finish_reason == "abort" or answer.token_ids == expected
    assert aborted > 0


def test_a_stream_of_premium_requests_does_not_starve_an_ordinary_one():
    now = 0.0
    engine = FakeEngine(num_blocks=8, block_size=4, max_running=2, clock=lambda: now, ageing_seconds=10.0)
    engine.add(make_request("ordinary", 8, max_tokens=16))
    for number in range(500):
        now += 0.5
        engine.add(make_request(f"p{number}", 8, priority=-1, max_tokens=8))
        engine.step()
        if engine.answers["ordinary"].finish_reason:
            break
    assert engine.answers["ordinary"].finish_reason == "length"


def test_decoding_streams_get_a_token_in_every_step_while_a_long_prompt_arrives():
    engine = FakeEngine(num_blocks=400, token_budget=8, max_running=4)
    for name in "abc":
        engine.add(make_request(name, 2, max_tokens=100))
    engine.step()
    engine.add(make_request("long", 300))
    for _ in range(50):
        before = {name: len(engine.answers[name].token_ids) for name in "abc"}
        engine.step()
        assert {name: len(engine.answers[name].token_ids) - before[name] for name in "abc"} == dict.fromkeys(
            "abc", 1
        )
