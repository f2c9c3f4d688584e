"""Drafts of a model are as long as pays, and few are tried where none does."""

import pytest

from llmbox.engine.core.speculation.draft_length import PROBED_REQUESTS, REST, DraftLength, best_length
from support.scheduling import make_request


@pytest.mark.parametrize(
    ("acceptance", "cost", "expected"),
    [
        (0.0, 0.1, 0),
        (0.9, 2.0, 0),
        (0.1, 0.2, 0),
        (0.99, 0.01, 9),
        (0.7, 0.1, 4),
        (0.7, 0.3, 2),
        (1.0, 0.0, 9),
    ],
)
def test_best_length(acceptance, cost, expected):
    assert best_length(acceptance, cost, 9) == expected


def test_best_length_has_the_highest_rate():
    for acceptance in (0.3, 0.5, 0.8, 0.95):
        for cost in (0.02, 0.1, 0.3):
            rates = [
                sum(acceptance**i for i in range(length + 1)) / (1 + length * cost) for length in range(13)
            ]
            best = best_length(acceptance, cost, 12)
            assert rates[best] == max(rates) or (best == 0 and max(rates) <= 1.05)


def measured(cost: float) -> DraftLength:
    length = DraftLength()
    length.record_step(1.0)
    length.record_passes(10 * cost, 10)
    assert length.cost == pytest.approx(cost)
    return length


def test_a_request_is_judged_by_its_own_acceptance():
    length, good, bad = measured(0.1), make_request("good", 8), make_request("bad", 8)
    for _ in range(20):
        for request, accepted in ((good, 4), (bad, 0)):
            if most := length.choose(request, 8):
                length.record_verification(request, most, min(accepted, most))
    assert length.choose(good, 8) >= 4
    assert length.choose(bad, 8) == 0


def test_a_request_without_gain_tries_once_more_after_a_rest():
    length, request = measured(0.5), make_request("a", 8)
    tries = []
    for number in range(4 * REST):
        if most := length.choose(request, 8):
            tries.append(number)
            length.record_verification(request, most, 0)
    assert tries[-1] > REST
    assert sum(number > 10 for number in tries) <= 2


def test_few_requests_try_where_none_gained():
    length = measured(0.5)
    for number in range(30):
        request = make_request(f"a{number}", 8)
        for _ in range(3):
            if most := length.choose(request, 8):
                length.record_verification(request, most, 0)
    tried = sum(length.choose(make_request(f"b{number}", 8), 8) > 0 for number in range(4 * PROBED_REQUESTS))
    assert tried == 4


def test_no_room_is_no_draft():
    assert DraftLength().choose(make_request("a", 8), 0) == 0


def test_a_slow_first_step_counts_for_little():
    length = DraftLength()
    for seconds in (50.0, 1.0, 1.0, 1.0):
        length.record_step(seconds)
        length.record_passes(seconds / 10, 1)
    length.record_passes(99.0, 1)
    assert length.cost == pytest.approx(0.1)
