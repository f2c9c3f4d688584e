"""Drafts are verified where they pay, by measured acceptance and prices; a cost model is the clock."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.core.speculation.draft_choice import (
    LONGEST_PAUSE,
    LOSS_SHARE,
    MIN_GAIN,
    MOST_CREDIT,
    OWED,
    REGAINED,
    START_LOSS,
    Acceptance,
    CallerDrafts,
    RequestDrafts,
    RowPrices,
    choose_lengths,
)
from support.lanes import examples
from support.played_drafts import PlayedAhead, PlayedRequests, time_without_drafts

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


@pytest.mark.parametrize("slow", [1, 6], ids=["without drafts", "with drafts"])
@pytest.mark.parametrize("known", [0, 1, 9])
def test_one_slow_step_changes_no_price(slow, known):
    prices = RowPrices(0.03)
    for _ in range(30):
        prices.record(1, 1, 1.0)
    for _ in range(known):
        prices.record(1, 6, 1.15)
    prices.record(1, slow, 40.0)
    for _ in range(3):
        prices.record(1, 1, 1.0)
        prices.record(1, 6, 1.15)
        assert 1.1 < prices.table(1, 5)[5] < 1.2


def test_a_price_follows_when_steps_have_become_slower():
    prices = RowPrices(0.03)
    for number in range(60):
        prices.record(1, 1, 1.0)
        prices.record(1, 6, 1.15 if number < 30 else 3.0)
    assert prices.table(1, 5)[5] == pytest.approx(3.0, rel=0.05)


def test_more_rows_never_look_cheaper():
    rng, prices = random.Random(3), RowPrices(0.03)
    for _ in range(400):
        rows = rng.randrange(1, 12)
        prices.record(1, rows, (1 + 0.03 * rows) * rng.uniform(0.6, 1.6))
        table = prices.table(1, 12)
        assert table == sorted(table)
        assert table[0] == 1.0


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
@given(st.lists(st.lists(st.floats(-1.0, 15.0), max_size=60), min_size=1, max_size=6))
def test_losses_are_a_share_of_the_answers(requests):
    caller, total, worst, bound = CallerDrafts(), 0.0, 0.0, 0.0
    for gains in requests:
        drafts, most = RequestDrafts(caller), 0.0
        for number, gain in enumerate(gains):
            if drafts.may_lose(number):
                drafts.record_gain(gain)
                total += gain
                worst = min(worst, total)
            most = START_LOSS + LOSS_SHARE * number + 1.0  # one step may lose a token more than it may
            assert worst >= -(bound + most)
        bound += most
        assert drafts._credit <= MOST_CREDIT
        assert -OWED <= caller.credit <= MOST_CREDIT


def test_a_request_without_credit_is_not_looked_up_until_it_has_some():
    drafts = RequestDrafts(CallerDrafts())
    assert drafts.may_lose(10)
    drafts.record_gain(-START_LOSS - 0.5)
    resumes = next(number for number in range(10, 1000) if drafts.may_lose(number))
    assert resumes == pytest.approx(10 + (0.5 + REGAINED) / LOSS_SHARE, abs=12)


def test_lookups_in_vain_become_rarer_until_one_finds_something():
    drafts, asked = RequestDrafts(CallerDrafts()), []
    for number in range(400):
        if drafts.may_lose(number):
            asked.append(number)
            drafts.record_lookup(number, found=False)
    assert asked[:16] == list(range(16))
    assert asked[-1] - asked[-2] == LONGEST_PAUSE
    drafts.record_lookup(400, found=True)
    drafts.record_lookup(401, found=False)
    assert drafts.resumes_at == 402


def test_what_drafts_gained_a_caller_his_next_request_may_lose():
    caller = CallerDrafts()
    RequestDrafts(caller).record_gain(MOST_CREDIT)
    first, second = RequestDrafts(caller), RequestDrafts(caller)
    assert RequestDrafts(CallerDrafts()).affordable(0.01) < second.affordable(0.01) < first.affordable(0.01)


def test_after_losses_a_caller_is_trusted_less_until_drafts_gain_again():
    caller = CallerDrafts()
    fresh = RequestDrafts(caller)
    for _ in range(5):
        fresh.record_gain(-0.3)
    careful = RequestDrafts(caller)
    careful.record_gain(1.0)
    assert careful.affordable(1e-3) > RequestDrafts(caller).affordable(1e-3) > fresh.affordable(1e-3)
    assert RequestDrafts(caller).affordable(1e-3) >= 1 + START_LOSS / 1e-3 - 1


def test_a_request_begins_with_the_acceptance_of_the_callers_earlier_ones():
    caller, other = CallerDrafts(), CallerDrafts()
    first = RequestDrafts(caller)
    for _ in range(40):
        first.record_verification("ngram", 4, 3, 0)
    assert RequestDrafts(caller).chance("ngram", 4) < 0.35
    assert RequestDrafts(caller).chance("suffix", 4) == RequestDrafts(other).chance("ngram", 4) == 0.6


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
    assert spent <= plain / 0.992


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


def ahead(price, texts, rows, **requests):
    """Time of these answers, one after another, on a device that launches ahead, and the drafts."""
    played = PlayedAhead(lambda running, rows: 1 + price * (rows - running), rows)
    took = sum(played.run(same, temperature=0.0, **requests) for same in texts)
    return took, played.scheduler.drafting.counts["ngram"]


def test_no_text_costs_more_than_a_hundredth_where_steps_are_launched_ahead():
    """A wait for drafts costs what the host takes; a device whose rows are dear is asked for none."""
    rng = random.Random(3)
    for price in (0.02, 0.3):
        texts = [[adverse(rng)] for _ in range(6)]
        without, _ = ahead(price, texts, 0)
        took, counts = ahead(price, texts, 40)
        assert counts.drafts > 0
        assert took <= 1.01 * without


def test_text_that_repeats_is_faster_than_launching_ahead():
    rng = random.Random(4)
    period = [rng.randrange(1000) for _ in range(30)]
    texts = [[(period * 14)[:400]]] * 3
    without, _ = ahead(0.02, texts, 0)
    took, counts = ahead(0.02, texts, 40)
    assert counts.accepted_tokens > 600
    assert took < without / 2.5


def test_where_rows_cost_a_step_each_little_is_lost_by_waiting():
    period = list(range(30))
    texts = [[(period * 14)[:400]]] * 3
    without, _ = ahead(1.0, texts, 0)
    took, _ = ahead(1.0, texts, 40)
    assert took <= without / 0.97
