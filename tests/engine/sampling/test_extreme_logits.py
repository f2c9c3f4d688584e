"""Extreme logits and requests that contradict themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling.sampler import BROKEN, NOTHING_LEFT
from support.lanes import examples
from support.sampling import CPU, make_request, sample_one, token_of

torch.set_num_threads(1)

VOCAB = 12
any_logit = st.one_of(
    st.floats(-1e30, 1e30),
    st.sampled_from([0.0, -0.0, 1e30, -1e30, 3.4e38, -3.4e38, 1e-38, -math.inf]),
)
rows = st.lists(any_logit, min_size=VOCAB, max_size=VOCAB)
ids = st.integers(-2, VOCAB + 2)
any_params = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.one_of(st.sampled_from([0.0, 1e-9, 1e-5, 1.0]), st.floats(0.0, 2.0)),
        "top_k": st.integers(-1, VOCAB + 5),
        "top_p": st.one_of(st.sampled_from([1e-300, 1e-9, 1.0]), st.floats(1e-6, 1.0)),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.one_of(st.just(1.0), st.floats(1e-3, 2.0)),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4),
        "bad_words": st.lists(st.lists(ids, max_size=3).map(tuple), max_size=6).map(tuple),
        "allowed_token_ids": st.one_of(st.none(), st.lists(ids, max_size=4).map(tuple)),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(ids, max_size=4).map(tuple),
        "logprobs": st.one_of(st.none(), st.integers(0, VOCAB + 3)),
    }
)
outputs = st.lists(st.integers(0, VOCAB - 1), max_size=5)


def forbidden_ids(request) -> set[int]:
    """What the request rules out, from its parameters alone."""
    params, tokens = request.params, request.token_ids
    out = {
        word[-1]
        for word in params.bad_words
        if word and tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1] and len(word) <= len(tokens) + 1
    }
    if request.num_output < params.min_tokens:
        out |= set(params.stop_token_ids)
    if params.allowed_token_ids is not None:
        out |= set(range(VOCAB)) - set(params.allowed_token_ids)
    return out


@given(st.lists(st.tuples(rows, any_params, outputs), min_size=1, max_size=5))
@settings(max_examples=examples(250))
def test_a_token_that_is_allowed_or_a_reason(batch):
    logits = torch.tensor([row for row, _, _ in batch], dtype=torch.float32)
    requests = [make_request(str(i), output=out, **params) for i, (_, params, out) in enumerate(batch)]
    results = Sampler(VOCAB, CPU).sample(logits, requests)
    for row, request, result in zip(logits, requests, results, strict=True):
        possible = {i for i in range(VOCAB) if row[i] > -math.inf}
        choices = possible - forbidden_ids(request)
        if not possible:
            assert result == BROKEN
        elif not choices:
            assert result == NOTHING_LEFT
        else:
            assert token_of(result) in choices
            assert (result.logprobs is None) == (request.params.logprobs is None)
        assert result == Sampler(VOCAB, CPU).sample(row[None], [request])[0]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_fails_alone(params, bad):
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    requests = [make_request(str(i), seed=i, **params) for i in range(3)]
    clean = Sampler(700, CPU).sample(logits, requests)
    logits[1, 650] = bad
    assert Sampler(700, CPU).sample(logits, requests) == [clean[0], BROKEN, clean[2]]


@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.9}, {"logit_bias": {0: 1.0}}, {"allowed_token_ids": (0, 1)}]
)
def test_a_wholly_broken_row(params):
    for value in (math.nan, math.inf, -math.inf):
        assert sample_one(torch.full((600,), value), make_request(**params)) == BROKEN


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (3,), "bad_words": ((3,),)},
        {"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 1},
        {"bad_words": tuple((i,) for i in range(VOCAB))},
        {"allowed_token_ids": (VOCAB + 1,)},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_contradictions_are_named(params, temperature):
    assert sample_one(torch.zeros(VOCAB), make_request(temperature=temperature, **params)) == NOTHING_LEFT


def test_a_forbidden_stop_token_is_free_again_after_min_tokens():
    logits = torch.zeros(VOCAB)
    params = {"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 1}
    assert token_of(sample_one(logits, make_request(output=[5], **params))) == 3


def test_only_one_id_is_possible():
    for params in ({}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-9}):
        logits = torch.full((600,), -math.inf)
        logits[421] = -1e30
        assert token_of(sample_one(logits, make_request(**params))) == 421


@pytest.mark.parametrize("seed", range(5))
def test_tiny_top_p_and_full_min_p_keep_the_best(seed):
    logits = torch.randn(600, generator=torch.Generator().manual_seed(seed))
    for params in ({"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}, {"temperature": 1e-6}):
        assert token_of(sample_one(logits, make_request(seed=seed, **params))) == int(logits.argmax())


def test_equal_logits_draw_from_everything():
    logits, seen = torch.full((VOCAB,), 7.0), set()
    for seed in range(200):
        seen.add(token_of(sample_one(logits, make_request(seed=seed))))
    assert seen == set(range(VOCAB))
