"""The fast paths against a slow sampler in plain Python, and against each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.sampling.draw import SamplingTensors, draw_binned, draw_ranked
from llmbox.engine.sampling.integer_softmax import ONE, weights
from llmbox.engine.sampling.philox import uniform
from llmbox.engine.sampling.topk import best_of, ranked
from support.sampling import make_request, plain_choice, plain_distribution, sample_one, token_of

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
@settings(max_examples=300, deadline=None)
def test_draws_what_the_plain_sampler_draws(logits, temperature, top_k, top_p, min_p, seed):
    request = make_request(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert token_of(sample_one(logits, request)) == plain_choice(logits, request)


@given(many_logits(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_greedy_takes_the_lowest_of_the_best_ids(logits, half):
    logits = logits.bfloat16() if half else logits
    assert token_of(sample_one(logits, make_request(temperature=0.0))) == plain_choice(
        logits, make_request(temperature=0.0)
    )


def knobs(rows: int, seed: int, *, temperature=1.0, top_k=10**9, top_p=1.0, min_p=0.0) -> SamplingTensors:
    def full(value):
        return torch.full((rows,), value, dtype=torch.float64)

    noise = torch.tensor([uniform(seed + row, 3) for row in range(rows)], dtype=torch.float64)
    return SamplingTensors(full(temperature), full(top_k).long(), full(top_p), full(min_p), noise)


@given(many_logits(), st.integers(1, 64), temperatures, top_ps, min_ps, st.integers(0, 2**40))
@settings(max_examples=200, deadline=None)
def test_few_candidates_bins_and_a_full_sort_agree(logits, size, temperature, top_p, min_p, seed):
    rows = 4
    logits_RV = logits.expand(rows, -1)
    settings_of_rows = knobs(rows, seed, temperature=temperature, top_p=top_p, min_p=min_p)
    full = draw_ranked(logits_RV, settings_of_rows, logits.shape[0], cuts_k=False)
    few = draw_ranked(logits_RV, settings_of_rows, size, cuts_k=False)
    binned = draw_binned(logits_RV, settings_of_rows)
    assert full.covered.all()
    assert torch.equal(full.id, binned.id)
    assert torch.equal(full.id[few.covered], few.id[few.covered])


def test_a_nucleus_larger_than_the_candidates_is_noticed():
    logits_RV = torch.zeros(1, 1000)
    assert not draw_ranked(logits_RV, knobs(1, 0, top_p=0.5), 256, cuts_k=False).covered.any()
    request = make_request(top_p=0.5, seed=11)
    assert token_of(sample_one(logits_RV[0], request)) == plain_choice(logits_RV[0], request)
    assert len(plain_distribution(logits_RV[0], request.params)) == 500


def test_the_edge_of_a_large_nucleus_is_not_rounded_to_float32():
    """Of 100,001 equal ids the last that is kept begins a millionth of the limit before it."""
    ids, kept = 100_001, 50_001
    half = knobs(1, 0, top_p=(kept - 1 + 5e-4) / ids)._replace(noise=torch.tensor([1 - 1e-12]).double())
    last = draw_binned(torch.zeros(1, ids), half).id
    assert (
        last.tolist() == draw_ranked(torch.zeros(1, ids), half, ids, cuts_k=False).id.tolist() == [kept - 1]
    )


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.25, 1), (0.75, 3), (0.5 + 1e-9, 3), (1.0, 4)])
def test_the_smallest_nucleus_that_reaches_top_p_is_kept(top_p, kept):
    """Sums of equal weights meet these limits exactly: what would only go beyond them is not kept."""
    logits_RV = torch.zeros(1, 4)
    last = knobs(1, 0, top_p=top_p)._replace(noise=torch.tensor([1 - 1e-12]).double())
    assert draw_ranked(logits_RV, last, 4, cuts_k=False).id.tolist() == [kept - 1]
    assert draw_binned(logits_RV, last).id.tolist() == [kept - 1]
    drawn = {
        token_of(sample_one(logits_RV[0], make_request(top_p=top_p, seed=seed, top_k=top_k)))
        for seed in range(60)
        for top_k in (0, 4)
    }
    assert drawn == set(range(kept))


@given(many_logits(), st.integers(1, 1600))
@settings(max_examples=200, deadline=None)
def test_ranking_is_certain_only_of_what_a_full_sort_gives(logits, size):
    _, ids, certain = ranked(logits[None], size)
    values = logits.tolist()
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))
    known = int(certain[0])
    assert ids[0, :known].tolist() == expected[:known]
    assert known == len(values) or known < size


def test_ranking_over_many_blocks():
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(3, 70_001, generator=generator) * 8).round() / 8
    logits[:, -1] = 40.0  # in the tail that is no whole block
    values, ids, certain = ranked(logits, 256)
    full_values, full_ids = torch.sort(logits, descending=True, stable=True)
    for row in range(3):
        known = int(certain[row])
        assert known > 100
        assert torch.equal(ids[row, :known], full_ids[row, :known])
        assert torch.equal(values[row], full_values[row, :256])


@given(many_logits())
@settings(max_examples=100, deadline=None)
def test_best_of_is_the_first_maximum(logits):
    best, index = best_of(torch.stack([logits, logits.flip(0)]))
    values = logits.tolist()
    assert best.tolist() == [max(values)] * 2
    assert index.tolist() == [values.index(max(values)), values[::-1].index(max(values))]


@pytest.mark.parametrize("place", [0, 63, 64, 130, 191])
def test_best_of_reports_nan_anywhere(place):
    logits = torch.zeros(2, 192)
    logits[1, place] = math.nan
    assert best_of(logits)[0].isnan().tolist() == [False, True]
    assert best_of(logits[:, : place + 1])[0].isnan().tolist() == [False, True]


def test_weights_are_scaled_probabilities():
    logits = torch.tensor([[3.0, 2.0, -20.0, 2.5, -math.inf]])
    got = weights(logits, logits.amax(-1, keepdim=True), torch.tensor([0.5]))[0].tolist()
    expected = [math.exp((value - 3.0) / 0.5) * ONE for value in logits[0].tolist()]
    assert got[0] == ONE
    assert got[4] == 0
    assert all(abs(a - b) <= 1 + 1e-6 * b for a, b in zip(got, expected, strict=True))
