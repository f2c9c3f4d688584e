"""A model's drafts are used where they pay, and tried on a budget where they did not."""

import random

import pytest

from llmbox.engine.core.speculation.model_drafting import (
    LONGEST_PAUSE,
    START_STEPS,
    TRIED_SHARE,
    ModelDrafting,
    ModelWaits,
)
from support.played_drafts import GuessingModel, PlayedAhead, PlayedRequests, time_without_drafts
from support.scheduling import make_request


def cheap(requests, rows):
    return 1 + 0.02 * rows


def unlike(rng, length=200):
    """No n-gram occurs twice."""
    return rng.sample(range(5, 90_000), length)


def gain(played, texts, **params):
    return time_without_drafts(played.time_of, texts) / played.run(texts, **params)


@pytest.mark.parametrize(
    ("share", "cost", "least"), [(0.7, 0.17, 1.45), (0.9, 0.17, 2.2), (0.7, 0.4, 1.1), (0.95, 0.05, 4.0)]
)
def test_a_model_that_is_often_right_is_used(share, cost, least):
    played, rng = PlayedRequests(cheap, proposers=[GuessingModel(share, cost)]), random.Random(3)
    gains = [gain(played, [unlike(rng)], temperature=0.0) for _ in range(4)]
    assert sum(gains) / 4 >= least


def test_drafts_of_a_batch_share_their_passes():
    played, rng = PlayedRequests(cheap, proposers=[GuessingModel(0.7, 0.3)], rows=64), random.Random(3)
    texts = [unlike(rng, 80) for _ in range(8)]
    assert gain(played, texts, temperature=0.0) > 1.12


@pytest.mark.parametrize(("share", "cost"), [(0.0, 0.2), (0.1, 0.2), (0.7, 1.5), (0.3, 0.5)])
@pytest.mark.parametrize("streams", [1, 4])
def test_a_model_that_does_not_pay_costs_a_hundredth(share, cost, streams):
    played, rng = PlayedRequests(cheap, proposers=[GuessingModel(share, cost)]), random.Random(4)
    for _ in range(2):  # to learn it
        played.run([unlike(rng) for _ in range(streams)], temperature=0.0)
    gains = [gain(played, [unlike(rng) for _ in range(streams)], temperature=0.0) for _ in range(4)]
    assert 4 / sum(1 / each for each in gains) >= 0.99
    assert played.scheduler.drafting._models[0].proposer.asked > 0


def test_bad_luck_of_sampled_requests_does_not_count_for_greedy_ones():
    model = GuessingModel(0.0, 0.3)
    played, rng = PlayedRequests(cheap, proposers=[model]), random.Random(5)
    played.run([unlike(rng) for _ in range(8)], temperature=1.0)
    model.share = 0.8
    assert gain(played, [unlike(rng)], temperature=0.0) > 1.3


def test_a_model_that_begins_to_pay_is_found():
    model = GuessingModel(0.0, 0.3)
    played, rng = PlayedRequests(cheap, proposers=[model]), random.Random(6)
    for _ in range(3):
        played.run([unlike(rng)], temperature=0.0)
    model.share = 0.85
    gains = [gain(played, [unlike(rng)], temperature=0.0) for _ in range(8)]
    assert gains[-1] > 1.3


def test_the_better_of_two_models_proposes():
    good, bad = GuessingModel(0.9, 0.2), GuessingModel(0.3, 0.2)
    good.method, bad.method = "mtp", "draft_model"
    played, rng = PlayedRequests(cheap, proposers=[bad, good]), random.Random(7)
    for _ in range(3):
        played.run([unlike(rng)], temperature=0.0)
    asked = good.asked, bad.asked
    played.run([unlike(rng)], temperature=0.0)
    assert good.asked - asked[0] > 20 * (bad.asked - asked[1])
    counts = played.scheduler.drafting.counts
    assert counts["mtp"].accepted_tokens > counts["draft_model"].accepted_tokens


def test_tries_are_within_their_budget():
    played, rng = PlayedRequests(lambda *_: 1.0, proposers=[GuessingModel(0.0, 2.0)]), random.Random(8)
    played.run([unlike(rng, 2000)], temperature=0.0)
    steps = played.scheduler.drafting._models[0].proposer.asked * 2.0
    assert START_STEPS < steps <= START_STEPS + 4 * 2.0 + 2000 * TRIED_SHARE


def test_no_room_is_no_draft():
    drafting = ModelDrafting(GuessingModel(1.0, 0.1))
    assert drafting.choose([(make_request("a", 8), 0)], [0.0], [0], [1.0]) == ([0], 1.0)
    assert drafting.explore([(make_request("a", 8), 0)]) is None
    assert drafting.explore([]) is None


def test_a_slow_first_step_counts_for_little():
    now = [0.0]
    model = GuessingModel(1.0, 0.0)
    model.played = played = PlayedRequests(cheap)
    request = make_request("a", 8)
    played.texts["a"] = [1] * 9
    drafting = ModelDrafting(model, lambda: now.__setitem__(0, now[0] + 0.05) or now[0])
    for seconds in (50.0, 1.0, 1.0, 1.0):
        drafting.record_step(seconds)
        drafting.propose([(request, 1)])
    assert drafting.cost(1) == pytest.approx(0.05)


def ahead(texts, proposers, rows=40):
    """Time of all but the first of these answers, one after another, on a device that launches ahead."""
    played = PlayedAhead(lambda running, rows: 1 + 0.02 * (rows - running), rows, proposers)
    _, *took = [played.run([text], temperature=0.0) for text in texts]
    return sum(took), played


def test_a_model_that_is_often_right_is_worth_waiting_for():
    rng = random.Random(3)
    texts = [unlike(rng) for _ in range(5)]
    without, _ = ahead(texts, [], rows=0)
    took, played = ahead(texts, [GuessingModel(0.9, 0.1)])
    assert took < without / 1.8
    assert played.scheduler.drafting.counts["draft_model"].accepted_tokens > 300


@pytest.mark.parametrize(("share", "cost"), [(0.0, 0.1), (0.3, 0.6)])
def test_waits_for_a_model_that_does_not_pay_cost_a_hundredth(share, cost):
    rng = random.Random(4)
    texts = [unlike(rng, 400) for _ in range(7)]
    without, _ = ahead(texts, [], rows=0)
    model = GuessingModel(share, cost)
    took, _ = ahead(texts, [model])
    assert model.asked > 0
    assert took <= 1.01 * without


def test_steps_that_waited_for_a_model_in_vain_are_followed_by_pauses():
    waits, waited = ModelWaits(), []
    for step in range(60):
        if waits.may_begin():
            waited.append(step)
            waits.begin()
        waits.end()
    assert waited[:3] == [0, 2, 6]
    assert waited[-1] - waited[-2] == LONGEST_PAUSE
    waits.begin()
    waits.note_asked()
    waits.end()
    assert [waits.may_begin() for _ in range(10)][-1]
