"""What drafts are guessed from, and how many a request gets."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.core.speculation import ngram_proposer as drafts
from llmbox.engine.core.speculation.ngram_proposer import (
    FIRST,
    LONGEST_REST,
    MOST,
    SIZES,
    NgramProposer,
    SuffixIndex,
)
from support.lanes import examples

few_ids = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def followed(tokens, most):
    """By looking at every place."""
    for size in SIZES:
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                repeated = list(tokens)
                for _ in range(most if size == SIZES[0] else 1):
                    repeated.append(repeated[place + len(repeated) - len(tokens)])
                return repeated[len(tokens) :]
    return []


@settings(max_examples=examples(300))
@given(few_ids, st.lists(st.integers(1, 9), max_size=8), st.integers(1, 9))
def test_the_latest_place_of_the_longest_ending(tokens, pieces, most):
    index, seen = SuffixIndex(), 0
    for size in [*pieces, len(tokens)]:
        seen = min(len(tokens), seen + size)
        assert index.catch_up(tokens[:seen])
        assert index.follow(tokens[:seen], most) == followed(tokens[:seen], most)


def test_a_long_prompt_is_taken_in_over_several_calls(monkeypatch):
    monkeypatch.setattr(drafts, "AT_ONCE", 10)
    index, tokens = SuffixIndex(), [*range(20), 0, 1, 2, 3]
    calls = 1
    while not index.catch_up(tokens):
        calls += 1
    assert calls == 3
    assert index.follow(tokens, 4) == [4, 5, 6, 7]


class Counted(list):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found


def test_a_token_more_costs_the_same_however_long_the_request_is():
    rng = random.Random(0)
    tokens, drafter = Counted(rng.randrange(9) for _ in range(3000)), NgramProposer()
    drafter.propose(tokens, 8)
    tokens.read = 0
    for _ in range(1000):
        tokens.append(rng.randrange(9))
        if proposed := drafter.propose(tokens, 8):
            drafter.record_verification(len(proposed), 0)
    # Two entries of six tokens together with a token more each, an ending of each size, and what follows it.
    assert tokens.read < 1000 * 10


def test_drafts_double_while_all_come_true_up_to_a_bound():
    drafter, tokens, sizes = NgramProposer(), [1, 2, 3, 4] * 4, []
    for _ in range(5):
        proposed = drafter.propose(tokens, 100)
        drafter.record_verification(len(proposed), len(proposed))
        sizes.append(len(proposed))
    assert sizes == [FIRST, 2 * FIRST, 4 * FIRST, MOST, MOST]


def test_some_that_come_true_earn_one_more():
    drafter, tokens = NgramProposer(), [1, 2, 3, 4] * 4
    drafter.record_verification(8, 5)
    assert len(drafter.propose(tokens, 100)) == 6


def test_no_more_than_asked_for():
    assert NgramProposer().propose([1, 2, 3, 4] * 4, 2) == [1, 2]


def test_two_tokens_speak_for_one():
    assert NgramProposer().propose([1, 2, 3, 9, 1, 2], 8) == [3]


def test_one_that_ended_proposes_nothing():
    drafter = NgramProposer()
    drafter.end()
    assert drafter.propose([1, 2, 3, 4] * 4, 8) == []


@pytest.mark.parametrize(("ids", "most"), [(9, 0.06), (2, 0.12)])
def test_who_never_repeats_pays_for_few_rows(ids, most):
    """Every guess is wrong, at every length of an answer; short endings and long ones are found."""
    rng = random.Random(1)
    tokens, drafter, rows = [rng.randrange(ids) for _ in range(500)], NgramProposer(), []
    for _ in range(1000):
        proposed = drafter.propose(tokens, MOST)
        rows.append(len(proposed))
        if proposed:
            drafter.record_verification(len(proposed), 0)
        tokens.append(rng.randrange(ids))
    assert sum(rows[:100]) <= 15
    assert sum(rows) < most * len(rows)
    steps = [n for n, drafted in enumerate(rows) if drafted]
    rests = [b - a - 1 for a, b in itertools.pairwise(steps)]
    assert rests[:5] == [4, 8, 16, 32, 64]
    assert min(rests[5:]) >= LONGEST_REST
