"""Every order of events of a few small requests, over scheduler and block pool as they are.

From each state that can be reached, each event is tried: a request arrives, one is aborted, one is preempted,
a step runs. `check()` proves the bookkeeping after each event, and the fake runner proves what every slot
holds. No leak: without requests no block is used. No deadlock: a step with work schedules rows. No
starvation: from each state, steps alone end every request.
"""

import pytest

from support.fake_runner import expected_output
from support.scheduling import FakeEngine, make_request

PROMPTS = ([1, 1, 2], [1, 1, 3, 4, 5], [1, 1], [6, 7, 8, 9])
"""Prompts that share a block, and one that shares none."""


def requests(count):
    """The second is another caller's, the third is premium."""
    return {
        f"r{n}": make_request(
            f"r{n}", PROMPTS[n], max_tokens=2 + n % 2, tenant="b" if n == 1 else "", priority=-(n == 2)
        )
        for n in range(count)
    }


def state_of(engine, aborts, preemptions):
    """All that later events depend on."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    present = tuple(
        (
            name,
            name in scheduler._running,
            request.num_computed,
            request.num_output,
            request.preemptions,
            request.displacements,
            request.num_charged,
            request.num_protected,
            tuple(request.block_table),
        )
        for name, request in scheduler._requests.items()
    )
    flows = tuple((band, tuple((f.tenant, f.tokens) for f in all_)) for band, all_ in scheduler._flows.bands)
    index = tuple(sorted(pool._cache._hash_of.items()))
    pools = tuple(pool._free), tuple(pool._cache.idle), index, tuple(scheduler._running)
    added = frozenset(engine.answers)
    return present, flows, pools, added, scheduler._was_express, aborts, preemptions


def apply(engine, asked, event):
    kind, name = event
    if kind == "add":
        engine.add(asked[name])
    elif kind == "abort":
        engine.abort(name)
    elif kind == "preempt":
        engine.scheduler.active.preempt(engine.scheduler._requests[name])
    else:
        before = len(engine.runner.plans)
        engine.step()
        assert len(engine.runner.plans) > before, "work is left, but no step was scheduled"
    engine.scheduler.check()


def explore(count, aborts, preemptions, **config):
    """Visit every state; return their number."""
    seen, after_step, done = set(), {}, set()
    paths = [()]
    while paths:
        path = paths.pop()
        asked = requests(count)
        engine = FakeEngine(block_size=2, **config)
        before = None
        for event in path:
            before = event == ("step", "") and state_of(engine, *left(path[:-1], aborts, preemptions))
            apply(engine, asked, event)
        aborts_left, preemptions_left = left(path, aborts, preemptions)
        state = state_of(engine, aborts_left, preemptions_left)
        if before:
            after_step[before] = state
        if state in seen:
            continue
        seen.add(state)
        present = list(engine.scheduler._requests)
        for name, answer in engine.answers.items():
            expected = expected_output("", asked[name].prompt_ids, asked[name].params)
            assert answer.token_ids == expected[: len(answer.token_ids)]
            assert name in present or answer.finish_reason == "abort" or answer.token_ids == expected
        if not present:
            done.add(state)
            assert engine.scheduler.pool.num_used == 0, "a block is leaked"
        events = [("add", name) for name in asked if name not in engine.answers]
        events += [("step", "")] if present else []
        events += [("abort", name) for name in present] if aborts_left else []
        if preemptions_left:
            events += [("preempt", each.request_id) for each in engine.scheduler.active.preemptible()]
        paths += [(*path, event) for event in events]
    for state in seen:
        walked = set()
        while state not in done:
            assert state not in walked, "steps go round without an end"
            walked.add(state)
            state = after_step[state]  # noqa: PLW2901 - the walk
    return len(seen)


def left(path, aborts, preemptions):
    kinds = [kind for kind, _ in path]
    return aborts - kinds.count("abort"), preemptions - kinds.count("preempt")


TIGHT = {"num_blocks": 4, "max_running": 2, "token_budget": 2, "context": 8}


@pytest.mark.parametrize(
    ("count", "aborts", "preemptions", "config"),
    [
        (2, 1, 1, TIGHT),
        (2, 1, 1, {**TIGHT, "num_blocks": 5, "cache": False}),
    ],
)
def test_every_order_of_events_ends_every_request(count, aborts, preemptions, config):
    assert explore(count, aborts, preemptions, **config) > 100
