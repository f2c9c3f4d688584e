"""Drafts are verified where they pay, by measured acceptance and prices; a cost model is the clock."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.core.speculation.draft_choice import (
    LOSS_SHARE,
    MIN_GAIN,
    MOST_CREDIT,
    START_LOSS,
    Acceptance,
    RequestDrafts,
    RowPrices,
    choose_lengths,
)
from support.lanes import examples
from support.played_drafts import PlayedRequests, time_without_drafts

shares = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4)
rising = st.lists(st.floats(0.0, 0.6), min_size=0, max_size=12).map(
    lambda steps: [1 + sum(steps[:count]) for count in range(len(steps) + 1)]
)


def rate(chances, lengths, prices, extra=0.0):
    tokens = sum(
        1 + sum(chance**j for j in range(1, n + 1)) for chance, n in zip(chances, lengths, strict=True)
    )
    return tokens / len(chances) / (prices[sum(lengths)] + extra * any(lengths))


@settings(max_examples=examples(300))
@given(shares, rising, st.integers(1, 4), st.floats(0.0, 0.5), st.randoms())
def test_no_other_lengths_give_more(chances, prices, most, extra, rng):
    lengths, gain = choose_lengths(chances, [most] * len(chances), prices, extra=extra)
    assert sum(lengths) < len(prices)
    assert all(0 <= length <= most for length in lengths)
    if any(lengths):
        assert gain == pytest.approx(rate(chances, lengths, prices, extra))
        assert gain > MIN_GAIN
    for _ in range(20):
        other = [rng.randrange(most + 1) for _ in chances]
        if sum(other) < len(prices):
            assert rate(chances, other, prices, extra) <= max(gain, MIN_GAIN) * (1 + 1e-9)


def test_requests_that_are_often_right_get_the_rows():
    lengths, _ = choose_lengths([0.95, 0.1], [9, 9], [1.0 + 0.05 * rows for rows in range(12)])
    assert lengths[0] == 9
    assert lengths[1] == 0


def test_prices_are_learned_for_each_number_of_requests():
    rng, prices = random.Random(1), RowPrices(0.03)
    times = {(2, rows): 1 + 0.01 * (rows - 2) for rows in range(2, 20)}
    times |= {(6, rows): 1.5 + 0.3 * (rows - 6) for rows in range(6, 20)}
    for number in range(3000):
        requests, rows = rng.choice(list(times))
        load = 3.0 if 1000 < number < 2000 else 1.0  # the machine is shared for a while
        prices.record(requests, rows, 0.02 * load * times[requests, rows] * rng.uniform(0.9, 1.1))
    for requests, rows in times:
        expected = times[requests, rows] / times[requests, requests]
        assert prices.table(requests, 18)[rows - requests] == pytest.approx(expected, rel=0.25)


def test_one_slow_step_does_not_end_drafts():
    prices = RowPrices(0.03)
    for _ in range(30):
        prices.record(1, 1, 1.0)
    prices.record(1, 6, 40.0)
    for _ in range(3):
        prices.record(1, 6, 1.1)
    assert prices.table(1, 5)[5] < 1.4


def test_old_prices_are_forgotten():
    prices = RowPrices(0.03)
    for _ in range(10):
        prices.record(1, 1, 1.0)
        prices.record(1, 6, 4.0)
    assert prices.table(1, 5)[5] > 2.5
    for _ in range(2000):
        prices.record(1, 1, 1.0)
    assert prices.table(1, 5)[5] == pytest.approx(1.15, abs=0.01)


def test_acceptance_follows_its_last_verifications():
    acceptance = Acceptance(0.6, 4.0)
    for _ in range(40):
        acceptance.record(5, 5)
    assert acceptance.share > 0.95
    for _ in range(100):
        acceptance.record(5, 0)
    assert acceptance.share < 0.2


@settings(max_examples=examples(200))
@given(st.lists(st.floats(-1.0, 15.0), max_size=200))
def test_losses_are_a_share_of_the_answer(gains):
    drafts, total, worst = RequestDrafts(), 0.0, 0.0
    for number, gain in enumerate(gains):
        if drafts.may_lose(number):
            drafts.record_gain(gain)
            total += gain
            worst = min(worst, total)
        assert worst >= -(START_LOSS + LOSS_SHARE * number + 1.0)
    assert drafts._credit <= MOST_CREDIT


PRICES = {
    "cheap": lambda requests, rows: 1 + 0.02 * rows,
    "tiles": lambda requests, rows: 1.0 + 0.1 * requests + 0.9 * max(0, -(-rows // 8) - 3),
    "dear": lambda requests, rows: 1 + 0.5 * rows,
    "all compute": lambda requests, rows: float(rows),
}

FIRST = {"dear": 0.12, "all compute": 0.45}
"""Prices that are assumed at first on such a machine, where they are higher than those of a fast one."""


def adverse(rng, ids=8, length=400):
    """Endings that stood before nearly always, and what followed them never follows again."""
    text, known = [rng.randrange(ids) for _ in range(4)], {}
    while len(text) < length:
        endings = [tuple(text[-size:]) for size in (4, 2)]
        token = rng.choice([each for each in range(ids) if each not in {known.get(end) for end in endings}])
        known.update(dict.fromkeys(endings, token))
        text.append(token)
    return text


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("price", PRICES)
def test_no_text_costs_more_than_a_hundredth(price, streams):
    rng, spent, plain = random.Random(f"{price} {streams}"), 0.0, 0.0
    played = PlayedRequests(PRICES[price], first_price=FIRST.get(price, 0.03))
    for _ in range(3):
        texts = [adverse(rng, length=250) for _ in range(streams)]
        spent += played.run(texts)
        plain += time_without_drafts(PRICES[price], texts)
    counts = played.scheduler.drafting.counts["ngram"]
    assert counts.accepted_tokens <= 0.1 * counts.draft_tokens
    assert counts.draft_tokens > 0 or price in FIRST, "nothing was tried"
    assert spent <= plain / 0.99


@pytest.mark.parametrize(
    ("price", "streams", "least"), [("cheap", 1, 4.0), ("cheap", 8, 1.9), ("tiles", 8, 1.8), ("dear", 1, 1.0)]
)
def test_text_that_repeats_is_faster_where_rows_are_cheap(price, streams, least):
    rng = random.Random(7)
    played = PlayedRequests(PRICES[price])
    prompt = [rng.randrange(5, 90_000) for _ in range(300)]
    texts = [prompt[20 * number : 20 * number + 150] for number in range(streams)]
    spent = [played.run(texts, prompt) for _ in range(3)][-1]
    assert time_without_drafts(PRICES[price], texts) / spent >= least


def test_where_rows_cost_a_step_each_nothing_is_lost():
    rng = random.Random(7)
    played = PlayedRequests(PRICES["all compute"], first_price=0.45)
    prompt = [rng.randrange(5, 90_000) for _ in range(300)]
    text = [token if rng.random() < 0.8 else rng.randrange(5, 90_000) for token in prompt[:250]]
    spent = [played.run([text], prompt) for _ in range(4)]
    assert sum(spent) <= 4 * time_without_drafts(PRICES["all compute"], [text]) / 0.97
