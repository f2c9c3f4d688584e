"""What drafts are guessed from, and how many a request gets."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.core.speculation import text_drafting as drafts
from llmbox.engine.core.speculation.text_drafting import SIZES, NgramProposer, SuffixIndex
from support.lanes import examples
from support.scheduling import make_request

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
        assert index.follow(tokens[:seen], most)[0] == followed(tokens[:seen], most)


def test_a_long_prompt_is_taken_in_over_several_calls(monkeypatch):
    monkeypatch.setattr(drafts, "AT_ONCE", 10)
    index, tokens = SuffixIndex(), [*range(20), 0, 1, 2, 3]
    calls = 1
    while not index.catch_up(tokens):
        calls += 1
    assert calls == 3
    assert index.follow(tokens, 4) == ([4, 5, 6, 7], 4)


class Counted(list):
    """Tokens that count how many of them are read."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.read += len(found) if isinstance(place, slice) else 1
        return found


def propose(tokens, most):
    (found,), _, _, (match,) = NgramProposer().propose([(make_request("a", tokens), most)])
    return found, match


def test_a_token_more_costs_the_same_however_long_the_request_is():
    rng = random.Random(0)
    request, proposer = make_request("a", 8), NgramProposer()
    request.token_ids = tokens = Counted(rng.randrange(9) for _ in range(3000))
    proposer.propose([(request, 8)])
    tokens.read = 0
    for _ in range(1000):
        tokens.append(rng.randrange(9))
        proposer.propose([(request, 8)])
    # Two entries of six tokens together with a token more each, an ending of each size, and what follows it.
    assert tokens.read < 1000 * 60


def test_no_more_than_asked_for():
    assert propose([1, 2, 3, 4] * 4, 2) == ([1, 2], 8)


def test_two_tokens_speak_for_one():
    assert propose([1, 2, 3, 9, 1, 2], 8) == ([3], 2)


@pytest.mark.parametrize(("same", "match"), [(4, 4), (7, 4), (8, 8), (15, 8), (16, 16), (30, 16)])
def test_longer_matches_are_told_apart(same, match):
    copy = range(100, 100 + same)
    assert propose([1, *copy, 7, 8, 9, 2, *copy], 2) == ([7, 8], match)


def test_requests_of_a_batch_are_looked_up_by_themselves():
    requests = [
        make_request("a", [1, 2, 3, 4] * 3),
        make_request("b", [5, 6, 7, 8] * 3),
        make_request("c", 9),
    ]
    proposed = NgramProposer().propose([(request, 3) for request in requests])
    assert proposed.drafts == [[1, 2, 3], [5, 6, 7], []]
    assert proposed.matches == [8, 8, 0]
    assert proposed.passes == 0
