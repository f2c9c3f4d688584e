"""Where drafts go: only into steps with room, and never at another request's cost."""

import pytest

from llmbox.engine.core.speculation.draft_scheduler import CALLERS
from llmbox.engine.core.speculation.proposer import Proposals
from llmbox.engine.core.step import SampledToken, StepResult
from llmbox.engine.ipc.messages import TokenLogprobs
from support.scheduling import make_request, make_scheduler, play_model, step

PERIOD = [1, 2, 3, 4]


def decoding(scheduler, *names, prompt=8, **params):
    """Requests that repeat their prompt's four tokens, with the first one drawn."""
    requests = [make_request(name, PERIOD * (prompt // 4), **params) for name in names]
    for request in requests:
        scheduler.add(request)
    step(scheduler, token_id=1)
    return requests


def drafts_of(plan):
    return {row.request.request_id: list(row.drafts) for row in plan.rows}


def answer(scheduler, plan, drawn, logprobs=None):
    """`drawn`: of each request, all that it gets. Returns the outputs."""
    sampled = {
        name: [SampledToken(i, logprobs and TokenLogprobs(token_id=i, logprob=-1.0, rank=1)) for i in ids]
        for name, ids in drawn.items()
    }
    result = StepResult(
        tokens={name: each[-1] for name, each in sampled.items()},
        accepted={name: each[:-1] for name, each in sampled.items() if len(each) > 1},
    )
    outputs = scheduler.update(plan, result)
    scheduler.check()
    return {output.request_id: output for output in outputs}


def test_drafts_are_computed_with_the_last_token():
    scheduler = make_scheduler(draft_rows=16)
    (request,) = decoding(scheduler, "a", max_tokens=20)
    plan = scheduler.schedule()
    (row,) = plan.rows
    assert (row.start, row.num_tokens, row.drafts) == (8, 4, [2, 3, 4])
    output = answer(scheduler, plan, {"a": [2, 3, 9]}, logprobs=True)["a"]
    assert output.token_ids == [2, 3, 9]
    assert [entry.token_id for entry in output.logprobs] == [2, 3, 9]
    assert request.token_ids[8:] == [1, 2, 3, 9]
    assert (request.num_computed, request.num_scheduled, request.num_pending) == (11, 11, 0)
    assert scheduler.output_tokens == 4
    counts = scheduler.drafting.counts["ngram"]
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (1, 3, 2)


@pytest.mark.parametrize(("drawn", "accepted"), [([2, 3, 4, 5], 3), ([2, 9], 1), ([7], 0), ([2, 3, 4], 3)])
def test_an_output_has_the_counts_of_its_step(drawn, accepted):
    """The last one ends with an accepted draft, which is a stop id."""
    scheduler = make_scheduler(draft_rows=16)
    decoding(scheduler, "a", max_tokens=20, stop_token_ids=(4,) if drawn[-1] == 4 else ())
    output = answer(scheduler, scheduler.schedule(), {"a": drawn})["a"]
    assert (output.draft_tokens, output.accepted_tokens) == (3, accepted)
    assert scheduler.drafting.counts["ngram"].accepted_tokens == accepted


def test_only_tokens_that_came_true_are_named_in_the_cache():
    scheduler = make_scheduler(draft_rows=16)
    (request,) = decoding(scheduler, "a", prompt=8, max_tokens=20)
    plan = scheduler.schedule()
    assert plan.rows[0].end == 12
    answer(scheduler, plan, {"a": [7]})
    assert request.num_computed == 9
    scheduler.abort("a")
    assert scheduler.pool.num_cached == 2
    scheduler.add(make_request("b", [*PERIOD * 2, 1, 2, 3, 4, 5]))
    scheduler.schedule()
    assert scheduler.kv_cache.prefix_hits == 8


def test_an_accepted_block_is_named():
    scheduler = make_scheduler(draft_rows=16)
    decoding(scheduler, "a", prompt=8, max_tokens=20)
    plan = scheduler.schedule()
    answer(scheduler, plan, {"a": [2, 3, 4, 5]})
    scheduler.abort("a")
    assert scheduler.pool.num_cached == 3
    scheduler.add(make_request("b", [*PERIOD * 3, 9]))
    scheduler.schedule()
    assert scheduler.kv_cache.prefix_hits == 12


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 30])
def test_rows_of_a_step_are_bounded_and_shared(rows):
    scheduler = make_scheduler(draft_rows=rows)
    decoding(scheduler, "a", "b", max_tokens=20)
    plan = scheduler.schedule()
    sizes = [len(row.drafts) for row in plan.rows]
    assert plan.num_tokens <= max(2, rows)
    assert sizes == {0: [0, 0], 1: [0, 0], 2: [0, 0], 3: [1, 0], 4: [1, 1], 7: [2, 2], 30: [2, 2]}[rows]
    play_model(scheduler, plan)


def test_a_step_with_a_prompt_has_none():
    scheduler = make_scheduler(draft_rows=8)
    decoding(scheduler, "a", max_tokens=20)
    scheduler.add(make_request("b", 8))
    assert drafts_of(scheduler.schedule())["a"] == []


def test_no_token_beyond_max_tokens():
    scheduler = make_scheduler(draft_rows=16, context=11, num_blocks=3)
    (request,) = decoding(scheduler, "a", max_tokens=3)
    plan = scheduler.schedule()
    assert drafts_of(plan) == {"a": [2]}
    assert answer(scheduler, plan, {"a": [2, 3]})["a"].finish_reason == "length"
    assert request.token_ids[8:] == [1, 2, 3]
    assert scheduler.pool.num_used == 0


def test_the_last_token_needs_no_draft():
    scheduler = make_scheduler(draft_rows=16)
    decoding(scheduler, "a", max_tokens=2)
    assert drafts_of(scheduler.schedule()) == {"a": []}


def test_a_stop_id_among_them_ends_the_request():
    scheduler = make_scheduler(draft_rows=16)
    decoding(scheduler, "a", max_tokens=20, stop_token_ids=(3,))
    output = answer(scheduler, scheduler.schedule(), {"a": [2, 3]})["a"]
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([2, 3], "stop", 3)
    assert scheduler.drafting.counts["ngram"].accepted_tokens == 2
    assert scheduler.pool.num_used == 0


def test_nobody_is_preempted_for_drafts():
    """Both have 3 of 4 slots of their last block: one draft fits, a block for more is left to the other."""
    scheduler = make_scheduler(draft_rows=30, num_blocks=7, cache=False)
    decoding(scheduler, "a", "b", prompt=8, max_tokens=12)
    answer(scheduler, scheduler.schedule(), {"a": [2, 5], "b": [2, 5]})
    for request in scheduler.running:
        request.token_ids[-2:] = [2, 3]  # the repetition goes on
    plan = scheduler.schedule()
    assert [len(drafts) for drafts in drafts_of(plan).values()] == [1, 1]
    assert scheduler.pool.num_available == 1
    play_model(scheduler, plan)
    assert scheduler.active.preemptions == 0


def test_a_block_is_taken_early_where_there_are_enough():
    scheduler = make_scheduler(draft_rows=30, num_blocks=9, cache=False)
    (request,) = decoding(scheduler, "a", prompt=8, max_tokens=12)
    answer(scheduler, scheduler.schedule(), {"a": [2, 3, 4, 1]})
    assert len(drafts_of(scheduler.schedule())["a"]) == 6
    assert len(request.block_table) == 5


def test_a_failure_with_drafts_is_tried_again_without():
    scheduler = make_scheduler(draft_rows=16)
    (request,) = decoding(scheduler, "a", max_tokens=20)
    plan = scheduler.schedule()
    assert plan.rows[0].drafts
    assert scheduler.update(plan, StepResult(failed={"a": "NaN"})) == []
    scheduler.check()
    assert request.num_computed == 0
    plan = scheduler.schedule()
    assert plan.rows[0].num_tokens == 9
    play_model(scheduler, plan)
    plan = scheduler.schedule()
    assert not plan.rows[0].drafts
    (output,) = scheduler.update(plan, StepResult(failed={"a": "NaN"}))
    assert output.error_message == "NaN"


class AnyDrafts:
    """A draft model that proposes as many tokens as it may."""

    method = "draft_model"

    def propose(self, wanted):
        return Proposals([[90] * most for _, most in wanted], 1, len(wanted))


def test_drafts_of_a_model_take_no_more_states_than_are_free(monkeypatch):
    """Of each draft the state before it is kept, to go back to: without a slot it would be lost."""
    scheduler = make_scheduler(draft_rows=16, state_slots=5, cache=False, proposers=[AnyDrafts()])
    monkeypatch.setattr(
        scheduler.drafting._models[0], "choose", lambda requests, *_: ([most for _, most in requests], 2.0)
    )
    requests = [make_request(name, 8, max_tokens=20) for name in ("a", "b")]
    for request in requests:
        scheduler.add(request)
    step(scheduler, token_id=1)
    step(scheduler, token_id=2)
    plan = scheduler.schedule()
    assert 0 < sum(len(row.drafts) for row in plan.rows) <= 3
    for row in plan.rows:
        assert {position for position, _ in row.saves} >= set(range(row.start + 1, row.end))
    play_model(scheduler, plan)


def test_lookups_get_the_rows_that_a_model_leaves(monkeypatch):
    """The drafts of a model are all verified, be those of lookups ever so likely."""
    scheduler = make_scheduler(draft_rows=12, cache=False, proposers=[AnyDrafts()])
    scheduler.add(make_request("b", range(100, 120), max_tokens=60))
    decoding(scheduler, "a", prompt=32, max_tokens=60)
    monkeypatch.setattr(
        scheduler.drafting._models[0],
        "choose",
        lambda requests, *_: ([6 * (request.request_id == "b") for request, _ in requests], 2.0),
    )
    plan = scheduler.schedule()
    drafts = drafts_of(plan)
    assert drafts["b"] == [90] * 6
    assert drafts["a"]
    assert plan.num_tokens == 12, "two requests, and ten drafts"
    play_model(scheduler, plan)


def test_the_log_has_the_acceptance_of_each_method_once_a_minute(caplog):
    now = [0.0]
    scheduler = make_scheduler(draft_rows=16, clock=lambda: now[0])
    caplog.set_level("INFO", "llmbox.engine")
    for name in ("a", "b", "c"):
        decoding(scheduler, name, max_tokens=4)
        answer(scheduler, scheduler.schedule(), {name: [2, 3, 9]})
        now[0] += 50.0
    assert [record.getMessage() for record in caplog.records] == [
        "draft tokens accepted so far: ngram 6 of 6",
    ]
    assert scheduler.drafting.stats()["draft_methods"]["ngram"].accepted_tokens == 6


def test_salts_of_one_key_do_not_push_out_what_is_known_of_another():
    drafting = make_scheduler(draft_rows=16).drafting
    drafting._history(make_request("a", PERIOD, tenant="other"))
    known = drafting._callers["other", ""]
    for number in range(2 * CALLERS):
        drafting._history(make_request(str(number), PERIOD, tenant="key", namespace=str(number)))
    assert drafting._callers["other", ""] is known
    assert len(drafting._callers) == CALLERS
    assert ("key", str(2 * CALLERS - 1)) in drafting._callers
