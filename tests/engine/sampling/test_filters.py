"""The sampler against a slow one in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.sampling import Sampler
from llmbox.kernels.reference.sampling import ONE, integer_softmax, likeliest
from support.lanes import examples
from support.sampling import CPU, make_request, plain_choice, plain_distribution, sample_one, token_of

torch.set_num_threads(1)

temperatures = st.one_of(st.just(1.0), st.floats(0.05, 2.0))
top_ps = st.one_of(st.just(1.0), st.floats(1e-6, 1.0))
min_ps = st.one_of(st.just(0.0), st.floats(0.0, 1.0))
seeds = st.integers(-(2**63), 2**63 - 1)


@st.composite
def many_logits(draw):
    """Rows of 1 to 1,500 ids; coarse steps make ties, wide scales make zero weights."""
    size = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 300, 700, 1499]))
    scale = draw(st.sampled_from([0.0, 0.1, 1.0, 4.0, 40.0]))
    step = draw(st.sampled_from([0.0, 0.25, 2.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(size, generator=generator) * scale
    return torch.round(logits / step) * step if step else logits


@given(many_logits(), temperatures, st.integers(0, 1600), top_ps, min_ps, seeds)
@settings(max_examples=examples(300))
def test_draws_what_the_plain_sampler_draws(logits, temperature, top_k, top_p, min_p, seed):
    request = make_request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert token_of(sample_one(logits, request)) == plain_choice(logits, request)


@given(many_logits(), st.booleans())
@settings(max_examples=examples(100))
def test_greedy_takes_the_lowest_of_the_best_ids(logits, half):
    logits = logits.bfloat16() if half else logits
    assert token_of(sample_one(logits, make_request(temperature=0.0))) == plain_choice(
        logits, make_request(temperature=0.0)
    )


@given(many_logits(), temperatures, st.integers(1, 1600), top_ps, min_ps, seeds)
@settings(max_examples=examples(100))
def test_neighbors_that_need_other_methods_change_nothing(logits, temperature, top_k, top_p, min_p, seed):
    kinds = [
        {"top_k": top_k, "top_p": top_p, "min_p": min_p},
        {"top_p": top_p},
        {"min_p": min_p},
        {"temperature": 0.0},
    ]
    rows = [
        make_request(str(n), seed=seed, **{"temperature": temperature, **kind})
        for n, kind in enumerate(kinds)
    ]
    together = Sampler(len(logits), CPU)
    together._rows_at_once = 64
    picks = together.sample(logits.expand(len(rows), -1), rows)
    assert [token_of(pick) for pick in picks] == [plain_choice(logits, row) for row in rows]


def test_the_edge_of_a_large_nucleus_is_not_rounded_to_float32():
    """Of 100,001 equal ids the last that is kept begins a millionth of the limit before it."""
    ids, kept = 100_001, 50_001
    request = make_request(top_p=(kept - 1 + 5e-4) / ids)
    assert len(plain_distribution(torch.zeros(ids), request.params)) == kept
    noisy = [make_request(top_p=request.params.top_p, seed=seed) for seed in range(3)]
    for one in noisy:
        assert token_of(sample_one(torch.zeros(ids), one)) == plain_choice(torch.zeros(ids), one)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.25, 1), (0.75, 3), (0.5 + 1e-9, 3), (1.0, 4)])
def test_the_smallest_nucleus_that_reaches_top_p_is_kept(top_p, kept):
    """Sums of equal weights meet these limits exactly: what would only go beyond them is not kept."""
    drawn = {
        token_of(sample_one(torch.zeros(4), make_request(top_p=top_p, seed=seed, top_k=top_k)))
        for seed in range(60)
        for top_k in (0, 4)
    }
    assert drawn == set(range(kept))


@given(many_logits(), st.integers(1, 1600))
@settings(max_examples=examples(200))
def test_the_likeliest_are_those_of_a_full_sort(logits, size):
    value, ids = likeliest(logits[None], min(size, len(logits)))
    values = logits.tolist()
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:size]
    assert ids[0].tolist() == expected
    assert value[0].tolist() == [values[i] for i in expected]


def test_weights_are_scaled_probabilities():
    logits = torch.tensor([[3.0, 2.0, -20.0, 2.5, -math.inf]])
    got = integer_softmax(logits, logits.amax(-1, keepdim=True), torch.tensor([0.5]))[0].tolist()
    expected = [math.exp((value - 3.0) / 0.5) * ONE for value in logits[0].tolist()]
    assert got[0] == ONE
    assert got[4] == 0
    assert all(abs(a - b) <= 1 + 1e-6 * b for a, b in zip(got, expected, strict=True))
