"""Decisions of the scheduler: who runs, how many tokens, which blocks. The test plays the model."""

import pytest

from llmbox.engine.core.step import SampledToken, StepResult
from llmbox.engine.errors import DoesNotFit, EngineError
from llmbox.engine.ipc.messages import TokenLogprobs
from support.scheduling import make_request, make_scheduler, play_model, scheduled, step


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def add(scheduler, *requests):
    for request in requests:
        scheduler.add(request)
    return requests


def finish_all(scheduler, limit=10_000):
    for _ in range(limit):
        if not scheduler.has_work:
            return
        assert step(scheduler), "work is left, but nothing was scheduled"
    raise AssertionError("no end")


# ---------------------------------------------------------------------- tokens per step


def test_prompt_then_one_token_a_step_until_max_tokens():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 10, max_tokens=3))
    assert [step(scheduler) for _ in range(4)] == [{"a": 10}, {"a": 1}, {"a": 1}, {}]
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0


def test_long_prompt_is_computed_in_chunks_of_the_budget():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("a", 20))
    assert [step(scheduler) for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 4}, {"a": 1}]


def test_only_the_last_chunk_gives_a_token():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("a", 12))
    plan = scheduler.schedule()
    assert [row.samples for row in plan.rows] == [False]
    assert play_model(scheduler, plan) == []
    plan = scheduler.schedule()
    assert [row.samples for row in plan.rows] == [True]
    assert len(play_model(scheduler, plan)) == 1


def test_decoding_comes_first_and_prompts_get_the_rest():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("a", 4), make_request("b", 4), make_request("long", 100))
    assert step(scheduler) == {"a": 4, "b": 4}
    for _ in range(5):
        assert step(scheduler) == {"a": 1, "b": 1, "long": 6}


def test_beside_decoding_requests_a_step_has_the_smaller_budget():
    scheduler = make_scheduler(token_budget=16, mixed_budget=8)
    add(scheduler, make_request("a", 4, max_tokens=3), make_request("long", 100))
    assert step(scheduler) == {"a": 4, "long": 12}
    assert [step(scheduler) for _ in range(3)] == [{"a": 1, "long": 7}, {"a": 1, "long": 7}, {"long": 16}]


def test_several_prompts_share_a_step():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("a", 3), make_request("b", 3), make_request("c", 5))
    assert step(scheduler) == {"a": 3, "b": 3, "c": 2}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 3}


def test_without_chunking_a_prompt_is_one_step_even_above_the_budget():
    scheduler = make_scheduler(token_budget=8, chunked_prefill=False)
    add(scheduler, make_request("a", 4), make_request("long", 100), make_request("b", 4))
    assert step(scheduler) == {"a": 4, "long": 100}
    assert step(scheduler) == {"a": 1, "long": 1, "b": 4}


def test_no_more_requests_run_than_allowed():
    scheduler = make_scheduler(max_running=2)
    add(scheduler, *(make_request(name, 4, max_tokens=2) for name in "abc"))
    assert [step(scheduler) for _ in range(3)] == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {"c": 4}]


def test_budget_below_the_seats_is_refused():
    with pytest.raises(EngineError, match="token_budget 4 is below max_running 8"):
        make_scheduler(token_budget=4, max_running=8)


# ---------------------------------------------------------------------- order


def test_lower_priority_number_first_then_arrival():
    scheduler = make_scheduler(max_running=1)
    add(
        scheduler,
        make_request("late", 4, priority=1, max_tokens=1),
        make_request("first", 4, max_tokens=1),
        make_request("second", 4, max_tokens=1),
        make_request("premium", 4, priority=-1, max_tokens=1),
    )
    assert [list(step(scheduler)) for _ in range(4)] == [["premium"], ["first"], ["second"], ["late"]]


def test_waiting_long_enough_beats_a_better_band():
    clock = Clock()
    scheduler = make_scheduler(max_running=1, clock=clock, ageing_seconds=10.0)
    add(scheduler, make_request("old", 4, priority=1, max_tokens=1))
    clock.now = 9.0
    add(scheduler, make_request("soon", 4, priority=0, max_tokens=1))
    clock.now = 11.0
    add(scheduler, make_request("new", 4, priority=0, max_tokens=1))
    assert [list(step(scheduler)) for _ in range(3)] == [["soon"], ["old"], ["new"]]


def test_urgent_prompt_goes_before_one_that_is_half_computed():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("long", 100))
    step(scheduler)
    add(scheduler, make_request("premium", 6, priority=-1))
    assert step(scheduler) == {"premium": 6, "long": 2}


def test_a_large_request_is_not_overtaken_by_small_ones():
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, make_request("a", 20, max_tokens=4), make_request("large", 24), make_request("small", 4))
    assert step(scheduler) == {"a": 20}
    assert step(scheduler) == {"a": 1}


# ---------------------------------------------------------------------- blocks


def test_admission_takes_blocks_for_the_whole_prompt():
    scheduler = make_scheduler(token_budget=8)
    (request,) = add(scheduler, make_request("a", 21))
    step(scheduler)
    assert len(request.block_table) == 6
    assert scheduler.slots_used == 8


def test_decoding_takes_one_block_when_the_last_is_full():
    scheduler = make_scheduler()
    (request,) = add(scheduler, make_request("a", 7))
    sizes = []
    for _ in range(6):
        step(scheduler)
        sizes.append(len(request.block_table))
    assert sizes == [2, 2, 3, 3, 3, 3]


def test_watermark_stays_free_at_admission_but_not_for_a_lone_request():
    scheduler = make_scheduler(num_blocks=10, watermark=0.2)
    add(scheduler, make_request("a", 16), make_request("b", 20))
    assert step(scheduler) == {"a": 16}
    scheduler = make_scheduler(num_blocks=10, watermark=0.2)
    add(scheduler, make_request("a", 36, max_tokens=4))
    assert step(scheduler) == {"a": 36}


def test_premium_share_is_kept_from_others():
    scheduler = make_scheduler(num_blocks=10, premium_share=0.3)
    add(scheduler, make_request("a", 16), make_request("b", 16))
    assert step(scheduler) == {"a": 16}
    add(scheduler, make_request("premium", 16, priority=-1))
    assert step(scheduler) == {"premium": 16}


def test_premium_share_in_use_is_not_kept_a_second_time():
    scheduler = make_scheduler(num_blocks=10, premium_share=0.3)
    add(scheduler, make_request("premium", 12, priority=-1, max_tokens=1), make_request("a", 24))
    assert step(scheduler) == {"premium": 12, "a": 24}


def test_premium_share_is_kept_again_when_its_user_has_left():
    scheduler = make_scheduler(num_blocks=10, premium_share=0.3)
    add(scheduler, make_request("premium", 12, priority=-1, max_tokens=1))
    step(scheduler)
    add(scheduler, make_request("a", 16), make_request("b", 16))
    assert step(scheduler) == {"a": 16}


@pytest.mark.parametrize(
    ("request_", "numbers"),
    [
        (make_request("a", 90, max_tokens=20), ["90", "20", "110", "context of 100"]),
        (make_request("a", 40, max_tokens=10), ["40", "10", "52 KV slots", "48 in all"]),
    ],
)
def test_what_can_never_fit_is_refused_at_once_with_numbers(request_, numbers):
    scheduler = make_scheduler(num_blocks=12, context=100)
    with pytest.raises(DoesNotFit) as refusal:
        scheduler.add(request_)
    assert all(number in str(refusal.value) for number in numbers)
    assert not scheduler.has_work


def test_what_just_fits_the_pool_finishes():
    scheduler = make_scheduler(num_blocks=12, context=100, premium_share=0.5, watermark=0.5)
    add(scheduler, make_request("a", 40, max_tokens=9))  # 48 slots: the last token's KV is not computed
    finish_all(scheduler)
    assert scheduler.active.preemptions == 0


# ---------------------------------------------------------------------- preemption


def test_newest_of_the_lowest_band_is_preempted():
    scheduler = make_scheduler(num_blocks=9)
    requests = add(
        scheduler,
        make_request("low old", 12, priority=1),
        make_request("low new", 12, priority=1),
        make_request("normal", 12, priority=0),
    )
    step(scheduler)
    assert step(scheduler) == {"low old": 1, "normal": 1}
    assert [request.preemptions for request in requests] == [0, 1, 0]


def test_preempted_request_keeps_its_tokens_and_computes_them_again():
    scheduler = make_scheduler(num_blocks=6, cache=False)
    _, new = add(scheduler, make_request("old", 12, max_tokens=2), make_request("new", 12, max_tokens=4))
    step(scheduler, token_id=5)
    assert new.num_output == 1
    assert step(scheduler) == {"old": 1}
    assert (new.num_computed, new.block_table, new.num_output) == (0, [], 1)
    assert step(scheduler) == {"new": 13}
    assert new.token_ids[12:] == [5, 7]


def test_preempted_request_goes_before_those_that_came_later():
    scheduler = make_scheduler(num_blocks=6, cache=False)
    add(scheduler, make_request("old", 12, max_tokens=2), make_request("new", 12, max_tokens=4))
    step(scheduler)
    add(scheduler, make_request("later", 8))
    step(scheduler)
    assert list(step(scheduler)) == ["new", "later"]


def test_preempted_four_times_a_request_is_pinned_with_its_worst_case():
    scheduler = make_scheduler(num_blocks=20, cache=False)
    (request,) = add(scheduler, make_request("a", 8, max_tokens=30))
    for _ in range(4):
        step(scheduler)
        scheduler.active.preempt(request)
    step(scheduler)
    assert len(request.block_table) == 10
    assert scheduler.kv_cache.is_pinned(request)
    add(scheduler, make_request("premium", 8, priority=-1, max_tokens=40))
    finish_all(scheduler)
    assert request.preemptions == 4


# ---------------------------------------------------------------------- static batching


def test_static_batch_admits_nobody_until_its_longest_is_done():
    scheduler = make_scheduler(batching="static", context=20, max_running=2)
    lengths = {"a": 2, "b": 4, "c": 1}
    add(scheduler, *(make_request(name, 4, max_tokens=length) for name, length in lengths.items()))
    assert [step(scheduler) for _ in range(5)] == [
        {"a": 4, "b": 4},
        {"a": 1, "b": 1},
        {"b": 1},
        {"b": 1},
        {"c": 4},
    ]


def test_static_batch_reserves_the_context_for_each():
    scheduler = make_scheduler(batching="static", context=20, num_blocks=20, premium_share=0.1, watermark=0.1)
    requests = add(scheduler, *(make_request(name, 4, max_tokens=2) for name in "abcde"))
    assert len(step(scheduler)) == 4
    assert [len(request.block_table) for request in requests] == [5, 5, 5, 5, 0]


def test_static_batch_may_be_larger_than_the_budget():
    scheduler = make_scheduler(batching="static", context=20, token_budget=8, max_running=8)
    add(scheduler, *(make_request(name, 6, max_tokens=2) for name in "abc"))
    assert step(scheduler) == {"a": 6, "b": 2}
    assert scheduler.num_running == 3


# ---------------------------------------------------------------------- prefix cache


def test_same_prompt_again_computes_the_last_block_only():
    scheduler = make_scheduler()
    first, second = make_request("a", range(12), max_tokens=1), make_request("b", range(12))
    add(scheduler, first)
    step(scheduler)
    add(scheduler, second)
    assert step(scheduler) == {"b": 4}  # the last token is always computed, so its block is not taken over
    assert (first.num_cached, second.num_cached) == (0, 8)


def test_prefix_is_shared_with_a_running_request():
    scheduler = make_scheduler()
    a, b = make_request("a", range(12)), make_request("b", [*range(8), 50, 51, 52])
    add(scheduler, a)
    step(scheduler)
    add(scheduler, b)
    assert step(scheduler) == {"a": 1, "b": 3}
    assert a.block_table[:2] == b.block_table[:2]
    assert scheduler.slots_used == a.num_computed + b.num_computed - 8


def test_output_is_cached_too():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", range(6), max_tokens=8))
    finish_all(scheduler)
    (followup,) = add(scheduler, make_request("b", [*range(6), *[7] * 8, 99]))
    assert step(scheduler) == {"b": 3}
    assert followup.num_cached == 12


def test_namespaces_do_not_share():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", range(12), namespace="alice"))
    step(scheduler)
    add(scheduler, make_request("b", range(12), namespace="bob"))
    assert step(scheduler) == {"a": 1, "b": 12}


def test_cache_off_shares_nothing_and_hashes_nothing():
    scheduler = make_scheduler(cache=False)
    (a,) = add(scheduler, make_request("a", range(12)))
    step(scheduler)
    add(scheduler, make_request("b", range(12)))
    assert step(scheduler) == {"a": 1, "b": 12}
    assert a.block_hashes == []
    assert scheduler.kv_cache.prefix_queries == 0


def test_blocks_are_not_found_before_they_are_computed():
    scheduler = make_scheduler(token_budget=100)
    add(scheduler, make_request("a", range(12)), make_request("b", range(12)))
    assert step(scheduler) == {"a": 12, "b": 12}


def test_prompt_logprobs_compute_every_row():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", range(12), max_tokens=1))
    step(scheduler)
    add(scheduler, make_request("b", range(12), prompt_logprobs=0))
    assert step(scheduler) == {"b": 12}


def test_hits_and_queries_are_counted_once_a_request():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", range(12), max_tokens=1))
    step(scheduler)
    (b,) = add(scheduler, make_request("b", range(12)))
    step(scheduler)
    scheduler.active.preempt(b)
    step(scheduler)
    assert (scheduler.kv_cache.prefix_queries, scheduler.kv_cache.prefix_hits) == (24, 8)
    assert scheduler.prompt_tokens == 24


# ---------------------------------------------------------------------- forks


@pytest.mark.parametrize("cache", [True, False])
def test_fork_waits_then_shares_full_blocks_and_copies_the_partial_one(cache):
    scheduler = make_scheduler(token_budget=8, cache=cache)
    parent, child = add(scheduler, make_request("a", range(11)), make_request("b", range(11), fork_of="a"))
    assert step(scheduler) == {"a": 8}
    assert step(scheduler) == {"a": 3}
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 1, "b": 1}
    assert child.block_table[:2] == parent.block_table[:2]
    assert plan.copies == [(parent.block_table[2], child.block_table[2])]
    play_model(scheduler, plan)
    scheduler.check()
    finish_all(scheduler)


def test_fork_of_a_prompt_that_ends_on_a_block_boundary_copies_the_last_block():
    scheduler = make_scheduler(cache=False)
    parent, child = add(scheduler, make_request("a", range(8)), make_request("b", range(8), fork_of="a"))
    step(scheduler)
    plan = scheduler.schedule()  # the last prompt token is computed again: not into a shared block
    assert plan.copies == [(parent.block_table[1], child.block_table[1])]
    assert child.num_computed == 7


def test_fork_holds_up_nobody_while_it_waits():
    scheduler = make_scheduler(token_budget=8)
    add(
        scheduler,
        make_request("a", range(12)),
        make_request("b", range(12), fork_of="a"),
        make_request("c", 9),
    )
    assert step(scheduler) == {"a": 8}
    assert step(scheduler) == {"a": 4, "c": 4}
    assert list(step(scheduler)) == ["a", "b", "c"]


def test_fork_of_nobody_is_admitted_plainly():
    scheduler = make_scheduler()
    add(scheduler, make_request("b", 10, fork_of="gone"), make_request("self", 10, fork_of="self"))
    assert step(scheduler) == {"b": 10, "self": 10}


def test_fork_goes_on_alone_when_its_sibling_is_aborted():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("a", range(12)), make_request("b", range(12), fork_of="a"))
    step(scheduler)
    scheduler.abort("a")
    finish_all(scheduler)


def test_fork_never_crosses_namespaces_or_prompts():
    scheduler = make_scheduler(cache=False)
    add(
        scheduler,
        make_request("a", range(12), namespace="alice"),
        make_request("b", range(12), namespace="bob", fork_of="a"),
        make_request("c", range(1, 13), namespace="alice", fork_of="a"),
    )
    assert step(scheduler) == {"a": 12, "b": 12, "c": 12}


def test_aborted_fork_never_runs():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("a", range(12)), make_request("b", range(12), fork_of="a"))
    step(scheduler)
    assert scheduler.abort("b")
    step(scheduler)
    assert step(scheduler) == {"a": 1}


def test_fork_ends_its_wait_when_a_resumed_sibling_finds_its_whole_prompt_cached():
    scheduler = make_scheduler()
    add(scheduler, make_request("old", range(12), max_tokens=9))
    finish_all(scheduler)
    add(scheduler, make_request("a", range(12), output=[7] * 6, max_tokens=50))
    add(scheduler, make_request("b", range(12), fork_of="a"))
    assert step(scheduler) == {"a": 2}
    assert step(scheduler) == {"a": 1, "b": 1}


# ---------------------------------------------------------------------- answers


def test_first_output_tells_what_is_told_once():
    clock = Clock()
    scheduler = make_scheduler(clock=clock)
    add(scheduler, make_request("a", 4, max_tokens=2))
    clock.now = 5.0
    (first,) = play_model(scheduler, scheduler.schedule())
    (second,) = play_model(scheduler, scheduler.schedule())
    assert (first.cached_tokens, first.scheduled_at, first.finish_reason) == (0, 5.0, None)
    assert (second.cached_tokens, second.scheduled_at, second.finish_reason) == (None, None, "length")


def test_stop_token_ends_with_its_id():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 4, stop_token_ids=(7,)))
    (output,) = play_model(scheduler, scheduler.schedule(), token_id=7)
    assert (output.finish_reason, output.stop_token_id, output.token_ids) == ("stop", 7, [7])
    assert not scheduler.has_work


def test_stop_token_within_min_tokens_does_not_stop():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 4, stop_token_ids=(7,), min_tokens=2))
    reasons = [play_model(scheduler, scheduler.schedule(), 7)[0].finish_reason for _ in range(3)]
    assert reasons == [None, None, "stop"]


def test_prompt_logprobs_of_all_chunks_come_with_the_first_output():
    scheduler = make_scheduler(token_budget=8)
    (request,) = add(scheduler, make_request("a", 10, prompt_logprobs=1, max_tokens=2))
    entries = [TokenLogprobs(token_id=token, logprob=-1.0, rank=1) for token in request.prompt_ids[1:]]
    assert scheduler.update(scheduler.schedule(), StepResult(prompt_logprobs={"a": entries[:8]})) == []
    (first,) = scheduler.update(
        scheduler.schedule(),
        StepResult(tokens={"a": SampledToken(1)}, prompt_logprobs={"a": entries[8:]}),
    )
    assert first.prompt_logprobs == [None, *entries]
    (second,) = play_model(scheduler, scheduler.schedule())
    assert second.prompt_logprobs is None


def test_prompt_logprobs_of_a_chunk_lost_by_preemption_are_not_told_twice():
    scheduler = make_scheduler(token_budget=8)
    (request,) = add(scheduler, make_request("a", 10, prompt_logprobs=1))
    entries = [TokenLogprobs(token_id=token, logprob=-1.0, rank=1) for token in request.prompt_ids[1:]]
    scheduler.update(scheduler.schedule(), StepResult(prompt_logprobs={"a": entries[:8]}))
    scheduler.active.preempt(request)
    scheduler.update(scheduler.schedule(), StepResult(prompt_logprobs={"a": entries[:8]}))
    tokens = {"a": SampledToken(1)}
    (first,) = scheduler.update(scheduler.schedule(), StepResult(tokens, {"a": entries[8:]}))
    assert first.prompt_logprobs == [None, *entries]


def test_logprobs_go_with_their_token():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 4, logprobs=0))
    entry = TokenLogprobs(token_id=3, logprob=-0.5, rank=1)
    (output,) = scheduler.update(scheduler.schedule(), StepResult(tokens={"a": SampledToken(3, entry)}))
    assert output.logprobs == [entry]


def test_failed_row_ends_that_request_and_its_blocks_leave_the_cache():
    scheduler = make_scheduler(token_budget=8)
    add(scheduler, make_request("bad", range(12)))
    step(scheduler)  # a first chunk, published
    add(scheduler, make_request("good", 4))
    plan = scheduler.schedule()
    result = StepResult(tokens={"good": SampledToken(1)}, failed={"bad": "NaN in logits"})
    bad, good = scheduler.update(plan, result)
    assert (bad.finish_reason, bad.error_code, bad.error_message) == (
        "error",
        "invalid_logits",
        "NaN in logits",
    )
    assert good.finish_reason is None
    scheduler.check()
    add(scheduler, make_request("again", range(12)))
    assert step(scheduler) == {"good": 1, "again": 7}


# ---------------------------------------------------------------------- abort


def test_abort_frees_blocks_at_once_whether_waiting_prefilling_or_decoding():
    scheduler = make_scheduler(token_budget=8, max_running=2)
    add(scheduler, make_request("decoding", 4), make_request("prefilling", 40), make_request("waiting", 4))
    step(scheduler)
    for request_id in ("waiting", "prefilling", "decoding"):
        assert scheduler.abort(request_id)
        scheduler.check()
    assert scheduler.pool.num_used == 0
    assert not scheduler.has_work
    assert not scheduler.abort("waiting")


def test_abort_while_the_step_runs_drops_its_result():
    scheduler = make_scheduler()
    add(scheduler, make_request("a", 4), make_request("b", 4))
    plan = scheduler.schedule()
    scheduler.abort("a")
    assert [output.request_id for output in play_model(scheduler, plan)] == ["b"]
    scheduler.check()


def test_many_aborts_behind_a_blocked_head_leave_no_trace():
    scheduler = make_scheduler(max_running=1)
    add(scheduler, make_request("a", 4), make_request("head", 4))
    step(scheduler)
    for number in range(1000):
        add(scheduler, make_request(f"r{number}", 4))
        scheduler.abort(f"r{number}")
    (flow,) = (flow for _, flows in scheduler._flows.bands for flow in flows)
    assert len(flow.heap) < 50
    scheduler.check()


def test_an_id_can_be_used_again_after_abort():
    scheduler = make_scheduler(max_running=1)
    add(scheduler, make_request("busy", 4, max_tokens=2), make_request("a", 4))
    scheduler.abort("a")
    add(scheduler, make_request("a", 9))
    step(scheduler)
    step(scheduler)
    assert step(scheduler) == {"a": 9}


# ---------------------------------------------------------------------- resume


def test_resumed_request_computes_prompt_and_output_then_goes_on():
    scheduler = make_scheduler()
    (request,) = add(scheduler, make_request("a", 10, output=[1, 2, 3], max_tokens=5))
    assert [step(scheduler) for _ in range(3)] == [{"a": 13}, {"a": 1}, {}]
    assert request.token_ids[10:] == [1, 2, 3, 7, 7]
