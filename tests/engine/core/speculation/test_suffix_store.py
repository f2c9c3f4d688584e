"""Answers of earlier requests, found again by their last tokens; never those of another caller."""

import random

from llmbox.engine.core.speculation.text_drafting import (
    LONGEST,
    RING,
    SLOTS,
    STORES,
    SuffixStore,
    SuffixStores,
)
from llmbox.engine.core.step import SampledToken, StepResult
from support.scheduling import make_request, make_scheduler, step


def test_what_followed_is_found():
    store = SuffixStore()
    store.add(range(10, 30))
    assert store.follow([1, 13, 14, 15, 16], 5)[0] == [17, 18, 19, 20, 21]
    assert store.follow([26, 27, 28, 29], 5)[0] == []
    assert store.follow([25, 26, 27, 28], 5)[0] == [29]
    assert store.follow([13, 14, 15, 99], 5)[0] == []


def test_the_latest_answer_counts():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5, 6])
    store.add([1, 2, 3, 4, 7, 8])
    assert store.follow([1, 2, 3, 4], 9)[0] == [7, 8]


def test_answers_do_not_run_into_each_other():
    store = SuffixStore()
    store.add([1, 2, 3, 4, 5])
    store.add([6, 7, 8, 9, 10])
    assert store.follow([1, 2, 3, 4], 9)[0] == [5]
    assert store.follow([2, 3, 4, 5], 9)[0] == []


def test_the_oldest_answers_are_written_over():
    store, rng = SuffixStore(), random.Random(3)
    answers = [[rng.randrange(150_000) for _ in range(3000)] for _ in range(60)]
    for answer in answers:
        store.add(answer)
    kept = RING // 3001
    for answer in answers[-kept + 2 :]:
        found = [
            store.follow(answer[end - 4 : end], 3)[0] == answer[end : end + 3] for end in range(4, 2990, 70)
        ]
        assert sum(found) > 0.4 * len(found), "slots of the hash table are shared"
    assert all(store.follow(answers[0][end - 4 : end], 3)[0] == [] for end in range(4, 2990, 70))


def test_a_long_answer_keeps_its_end():
    store = SuffixStore()
    store.add(range(LONGEST + 100))
    assert store.follow([50, 51, 52, 53], 2)[0] == []
    assert store.follow([LONGEST, LONGEST + 1, LONGEST + 2, LONGEST + 3], 2)[0] == [LONGEST + 4, LONGEST + 5]


def test_callers_have_stores_of_their_own_and_few_are_kept():
    stores = SuffixStores()
    for number in range(STORES + 3):
        stores.add(f"key{number}", "", range(number, number + 9))
    assert stores.find("key2", "") is None
    assert stores.find("key3", "") is not None
    assert stores.find("key3", "salt") is None
    assert stores.find("key5", "").follow([5, 6, 7, 8], 2)[0] == [9, 10]
    stores.add("short", "", [1, 2, 3, 4])
    assert stores.find("short", "") is None


def answered(scheduler, name, ids, **options):
    """Answer a request with these ids, one a step. Returns the steps that it took with drafts."""
    request = make_request(name, [90, 91, 92, 93], max_tokens=len(ids), **options)
    scheduler.add(request)
    step(scheduler, token_id=ids[0])
    steps = 1
    while request.request_id in scheduler._requests:
        plan = scheduler.schedule()
        (row,) = plan.rows
        place = request.num_output
        right = [ids[place]]
        for draft, wanted, after in zip(row.drafts, ids[place:], ids[place + 1 :], strict=False):
            if draft != wanted:
                break
            right.append(after)
        finish(scheduler, plan, name, right)
        steps += 1
    return steps


def finish(scheduler, plan, name, ids):
    sampled = [SampledToken(each) for each in ids]
    scheduler.update(plan, StepResult(tokens={name: sampled[-1]}, accepted={name: sampled[:-1]}))
    scheduler.check()


def test_the_same_answer_again_takes_fewer_steps():
    scheduler = make_scheduler(draft_rows=16, context=64, num_blocks=64)
    ids = [*range(20, 50)]
    assert answered(scheduler, "a", ids) == 30
    assert answered(scheduler, "b", ids) < 12
    assert answered(scheduler, "c", [*ids[:10], 77, *ids[11:]]) < 22
    assert answered(scheduler, "d", ids, tenant="other") == 30, "of another caller"
    assert answered(scheduler, "e", ids, namespace="salt") == 30


def test_without_rows_for_drafts_nothing_is_kept():
    scheduler = make_scheduler(draft_rows=0, context=64, num_blocks=64)
    answered(scheduler, "a", [*range(20, 50)])
    assert not scheduler.drafting.answers.stores._stores


def test_all_stores_together_take_16_megabytes():
    each = 4 * (RING + SLOTS)
    assert STORES * each <= 16 << 20
