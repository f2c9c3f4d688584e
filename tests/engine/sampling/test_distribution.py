"""Sampled frequencies against exact distributions that are computed here from the textbook definitions."""

import math

import pytest
import torch

from llmbox.engine.sampling import Sampler
from llmbox.kernels.reference.sampling import SamplingKinds, sample_rows
from support.sampling import CPU, make_request, sample_rows_by, token_of

torch.set_num_threads(1)
pytestmark = pytest.mark.slow

LOGITS = [2.0, -1.0, 0.5, 1.9, -3.0, 0.5, 1.0, 0.0, -0.5, 1.4, -8.0, 0.2]
CASES = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_k": 5, "temperature": 1.5},
    {"top_p": 0.7},
    {"top_p": 0.95, "temperature": 0.8},
    {"min_p": 0.2},
    {"min_p": 0.1, "temperature": 1.6},
    {"top_k": 6, "top_p": 0.8},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
]


def exact(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """min-p, then top-k, then top-p, each over what the one before left."""
    weights = [math.exp(value / temperature) for value in LOGITS]
    kept = [i for i, weight in enumerate(weights) if weight >= min_p * max(weights)]
    kept = sorted(kept, key=lambda i: (-weights[i], i))[: top_k or None]
    total, covered, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if covered < top_p * total:
            nucleus.append(i)
        covered += weights[i]
    mass = sum(weights[i] for i in nucleus)
    return [weights[i] / mass if i in nucleus else 0.0 for i in range(len(LOGITS))]


def assert_follows(counts: list[int], probabilities: list[float]) -> None:
    """Chi-square below its 99.99 % point (Wilson-Hilferty); the draws are fixed, so this cannot flake."""
    draws = sum(counts)
    assert all(count == 0 for count, p in zip(counts, probabilities, strict=True) if p == 0)
    cells = [(count, p * draws) for count, p in zip(counts, probabilities, strict=True) if p * draws >= 5]
    freedom = max(1, len(cells) - 1)
    chi_square = sum((count - expected) ** 2 / expected for count, expected in cells)
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_over_many_seeds(case):
    draws = 20_000
    params = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **case}

    row = (params["temperature"], params["top_k"], params["top_p"], params["min_p"])
    rows = sample_rows_by([row] * draws, range(draws), [17] * draws)
    kinds = SamplingKinds(whole=True, candidates=len(LOGITS))
    ids, _ = sample_rows(torch.tensor(LOGITS).expand(draws, -1), rows, kinds)
    assert_follows(torch.bincount(ids, minlength=len(LOGITS)).tolist(), exact(**case))


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_through_the_sampler(vary):
    case = {"top_k": 6, "top_p": 0.9, "temperature": 1.3}
    draws, counts = 3000, [0] * len(LOGITS)
    requests = [
        make_request(str(i), seed=i, **case)
        if vary == "seed"
        else make_request(str(i), prompt=[0] * (i + 1), seed=99, **case)
        for i in range(draws)
    ]
    for result in Sampler(len(LOGITS), CPU).sample(torch.tensor(LOGITS).expand(draws, -1), requests):
        counts[token_of(result)] += 1
    assert_follows(counts, exact(**case))


def test_a_wide_vocabulary_is_drawn_evenly():
    vocab_size, draws = 4096, 12_000
    counts = [0] * 64
    for start in range(0, draws, 2000):
        rows = sample_rows_by([(1.0, 0, 1.0, 0.0)] * 2000, [1] * 2000, range(start, start + 2000))
        ids, _ = sample_rows(torch.zeros(2000, vocab_size), rows, SamplingKinds(whole=True))
        for token in ids.tolist():
            counts[token * 64 // vocab_size] += 1
    assert_follows(counts, [1 / 64] * 64)
