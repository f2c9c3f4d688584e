"""How requests are batched, chunked, cached, forked or preempted never changes their tokens."""

import random
from itertools import product

import pytest

from llmbox.engine.core.kv_cache.state_manager import pool_blocks
from support.fake_runner import expected_output
from support.lanes import nightly
from support.scheduling import FakeEngine, make_request


def workload(seed):
    """Prompts with common prefixes, two namespaces, forks, stop tokens; sixteen requests."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(9) for _ in range(length)] for length in (0, 8, 13)]
    requests = []
    for number in range(16):
        parent = requests[-1] if requests and number % 4 == 1 else None
        prompt = parent.prompt_ids if parent else rng.choice(prefixes) + [number] * rng.randrange(1, 12)
        requests.append(
            make_request(
                f"r{number}",
                prompt,
                namespace=parent.cache_namespace if parent else rng.choice(["", "alice"]),
                fork_of=parent.request_id if parent else None,
                priority=rng.choice([-1, 0, 0, 1]),
                max_tokens=rng.randrange(1, 20),
                min_tokens=rng.randrange(3),
                stop_token_ids=(3, 4) if number % 2 else (),
                temperature=float(number % 2),
                seed=number,
            )
        )
    return requests


VARIANTS = {
    "plain": {},
    "one at a time": {"max_running": 1},
    "cache off": {"cache": False},
    "one token a chunk": {"token_budget": 8},
    "odd chunks": {"token_budget": 11},
    "no chunks": {"token_budget": 8, "chunked_prefill": False},
    "static": {"batching": "static", "context": 64},
    "static, chunks, cache off": {"batching": "static", "context": 64, "token_budget": 9, "cache": False},
    "preempted": {"num_blocks": 13},
    "preempted, cache off": {"num_blocks": 13, "cache": False},
    "preempted, chunks": {"num_blocks": 13, "token_budget": 8},
    "block of one": {"block_size": 1, "num_blocks": 50},
    "window": {"window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
    "window, preempted, chunks": {
        "window": 6,
        "window_blocks": pool_blocks(6, 4, 8, 8),
        "num_blocks": 13,
        "token_budget": 8,
    },
    "window, cache off": {
        "window": 1,
        "window_blocks": pool_blocks(1, 4, 8, 11),
        "cache": False,
        "token_budget": 11,
    },
    "recurrent": {"state_slots": 20},
    "recurrent, one at a time": {"state_slots": 20, "max_running": 1},
    "recurrent, two slots": {"state_slots": 2},
    "recurrent, one slot": {"state_slots": 1},
    "recurrent, preempted": {"num_blocks": 13, "state_slots": 10},
    "recurrent, preempted, chunks": {"num_blocks": 13, "state_slots": 5, "token_budget": 8},
    "recurrent, cache off": {"state_slots": 9, "cache": False, "token_budget": 11},
    "recurrent, static": {"state_slots": 12, "batching": "static", "context": 64},
    "recurrent, window": {"state_slots": 20, "window": 5, "window_blocks": pool_blocks(5, 4, 8, 64)},
    "recurrent, window, preempted, chunks": {
        "state_slots": 5,
        "window": 6,
        "window_blocks": pool_blocks(6, 4, 8, 8),
        "num_blocks": 13,
        "token_budget": 8,
    },
    "recurrent, window, cache off": {
        "state_slots": 9,
        "window": 1,
        "window_blocks": pool_blocks(1, 4, 8, 11),
        "cache": False,
        "token_budget": 11,
    },
    "short context": {"short_context": 17},
    "short context, one at a time": {"short_context": 17, "max_running": 1},
    "short context, cache off": {"short_context": 13, "cache": False, "token_budget": 11},
    "short context, preempted, chunks": {"short_context": 15, "num_blocks": 13, "token_budget": 8},
    "short context, static": {"short_context": 16, "batching": "static", "context": 64},
    "short context, window": {
        "short_context": 14,
        "window": 5,
        "window_blocks": pool_blocks(5, 4, 8, 64),
    },
    "short context, recurrent, preempted": {"short_context": 17, "num_blocks": 13, "state_slots": 10},
    "block of five, premium share": {
        "block_size": 5,
        "num_blocks": 12,
        "premium_share": 0.3,
        "watermark": 0.1,
    },
}


PIPELINES = {
    "": {},
    "overlap": {"depth": 1},
    "drafts": {"draft_rows": 12},
    "many drafts": {"draft_rows": 64},
    "two stages": {"stages": 2, "depth": 1},
    "three stages, overlap": {"stages": 3, "depth": 3},
}


SEEDS = 4


# Every variant in every pipeline: in the suite with one seed, which take turns, each night with all.
CASES = [
    (variant, pipeline, seed) if (row + column) % SEEDS == seed else nightly(variant, pipeline, seed)
    for (row, variant), (column, pipeline), seed in product(
        enumerate(VARIANTS), enumerate(PIPELINES), range(SEEDS)
    )
]


@pytest.mark.parametrize(("variant", "pipeline", "seed"), CASES)
def test_tokens_are_those_of_the_request_alone(variant, pipeline, seed):
    engine = FakeEngine(**PIPELINES[pipeline], **VARIANTS[variant])
    requests = workload(seed)
    for request in requests:
        engine.add(request)
    answers = engine.run()
    short = VARIANTS[variant].get("short_context", 0)
    for request in requests:
        params = request.params
        assert answers[request.request_id].token_ids == expected_output(
            request.cache_namespace, request.prompt_ids, params, short
        )
    if short:
        seen = {row.request for plan in engine.runner.plans for row in plan.rows}
        lengths = {(request.num_prompt > short, request.is_long) for request in seen}
        assert lengths >= {(False, False), (False, True)}, "some stay short, some grow beyond it"
    if "preempted" in variant:
        assert engine.scheduler.active.preemptions > 0
    if "draft_rows" in PIPELINES[pipeline] and variant.endswith("one at a time"):
        assert engine.scheduler.drafting.counts["ngram"].accepted_tokens > 0


@pytest.mark.parametrize("short", [0, 15])
@pytest.mark.parametrize("cut", range(0, 12, 3))
def test_resume_on_a_new_engine_goes_on_exactly(cut, short):
    requests = workload(5)
    first = FakeEngine(num_blocks=13, short_context=short)
    second = FakeEngine(num_blocks=13, token_budget=8, short_context=short)
    for request in requests:
        first.add(request)
    for _ in range(cut):
        first.step()
    for request in requests:
        answer = first.answers[request.request_id]
        if answer.finish_reason is None:
            second.answers[request.request_id] = answer
            second.add(
                make_request(
                    request.request_id,
                    request.prompt_ids,
                    output=list(answer.token_ids),
                    namespace=request.cache_namespace,
                    fork_of=request.fork_of,
                    **{name: getattr(request.params, name) for name in request.params.__slots__},
                )
            )
    second.run()
    for request in requests:
        assert first.answers[request.request_id].token_ids == expected_output(
            request.cache_namespace, request.prompt_ids, request.params, short
        )


def test_slots_wasted_by_paging_are_a_fraction_of_those_by_contiguous_reservation():
    """The measure itself: blocks reserved against slots holding a token, at every step."""

    def waste(batching):
        rng = random.Random(1)
        engine = FakeEngine(num_blocks=80, context=80, batching=batching, max_running=16, cache=False)
        for number in range(32):
            engine.add(make_request(f"r{number}", 16, max_tokens=rng.randrange(1, 64), seed=number))
        reserved = used = 0
        while engine.engine.has_work:
            stats = engine.engine.step().stats
            reserved, used = reserved + stats.blocks_used * 4, used + stats.slots_used
        return 1 - used / reserved

    assert waste("continuous") < 0.08
    assert waste("static") > 0.5
