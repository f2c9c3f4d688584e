"""Tokens and logprobs of the C++ kernels are those of the sampler in plain PyTorch, whatever is asked.

Weights may differ in the last bit of `exp`, which moves one draw in many thousands: examples never change.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.core.request import Request
from llmbox.engine.core.step import SampledToken
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling.sampler import BROKEN
from llmbox.kernels.cpu.backend import CPUBackend
from llmbox.kernels.dispatch import load_backend
from support.kernel_backends import backends
from support.lanes import examples
from support.noise import uniform
from support.sampling import CPU, make_request, token_of

VOCAB = 151_936
LEVELS = [name for name in backends() if name.startswith("cpu ")]
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "logprobs": 5},
    {"top_k": 700, "temperature": 0.2},
    {"top_k": 5000, "min_p": 1e-6},
    {"top_k": VOCAB + 3, "top_p": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5, "logprobs": 20},
    {"repetition_penalty": 1e-30, "temperature": 1.5},
    {"frequency_penalty": 1e38, "presence_penalty": -1e38, "top_p": 0.9},
    {"logit_bias": {5: 100.0, 7: -100.0, 9: 1e38}, "top_k": 3, "repetition_penalty": 1.1},
    {"allowed_token_ids": tuple(range(1499, 0, -7)), "bad_words": ((7,), (3, 14)), "top_p": 0.5},
    {"allowed_token_ids": (4, 700, 2), "top_k": 5},
    {"allowed_token_ids": (), "logprobs": 2},
    {"min_tokens": 9, "stop_token_ids": (0, 1, 2), "temperature": 1.3},
)


@pytest.fixture(scope="module", params=LEVELS)
def backend(request: pytest.FixtureRequest) -> CPUBackend:
    torch.set_num_threads(1)
    return load_backend(request.param)


def sampler(backend: CPUBackend, vocab: int, threads: int = 3) -> Sampler:
    backend.use_threads([0, 1, 0][:threads])
    return Sampler(vocab, CPU, backend.ops())


def assert_equal(got: list[SampledToken | str], expected: list[SampledToken | str]) -> None:
    assert [without_logprobs(one) for one in got] == [without_logprobs(one) for one in expected]
    for one, other in zip(got, expected, strict=True):
        if isinstance(one, SampledToken) and one.logprobs is not None:
            mine, theirs = one.logprobs, other.logprobs
            assert mine.rank == theirs.rank
            assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-6, nan_ok=True)
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-6)


def without_logprobs(result: SampledToken | str) -> int | str:
    return result if isinstance(result, str) else result.token_id


def batch(vocab: int, deviation: float, rounding: float = 0.0) -> tuple[torch.Tensor, list[Request]]:
    """Two rows of every kind, then broken ones."""
    generator = torch.Generator().manual_seed(vocab)
    rows = 2 * len(KINDS) + 4
    logits = torch.randn(rows, vocab, generator=generator) * deviation
    if rounding:
        logits = (logits / rounding).round() * rounding
    for row, bad in enumerate((math.nan, math.inf, -math.inf, math.nan), start=rows - 4):
        logits[row, : vocab if bad == -math.inf else 1] = bad
    asked = [
        make_request(str(row), output=[row, 3, row % 5 + 900], seed=row * 7919, **KINDS[row % len(KINDS)])
        for row in range(rows)
    ]
    return logits, asked


@pytest.mark.parametrize(
    ("vocab", "deviation", "rounding"),
    [(VOCAB, 4.0, 0.0), (VOCAB, 0.3, 0.0), (VOCAB, 3.0, 0.125), (1499, 3.0, 0.0), (1536, 0.0, 0.0)],
)
def test_every_kind_of_request(backend: CPUBackend, vocab: int, deviation: float, rounding: float) -> None:
    logits, asked = batch(vocab, deviation, rounding)
    before = logits.clone()
    got = sampler(backend, vocab).sample(logits, asked)
    assert torch.equal(logits.nan_to_num(1.5), before.nan_to_num(1.5))
    assert_equal(got, Sampler(vocab, CPU).sample(logits, asked))
    assert got[-4:] == [BROKEN] * 4


def test_a_row_alone_is_a_row_of_a_batch(backend: CPUBackend) -> None:
    logits, asked = batch(20_000, 3.0)
    together = sampler(backend, 20_000).sample(logits, asked)
    for threads in (1, 3):
        alone = sampler(backend, 20_000, threads)
        for row, request in enumerate(asked):
            assert alone.sample(logits[row : row + 1].clone(), [request]) == together[row : row + 1]


def test_padding_is_no_part_of_the_vocabulary(backend: CPUBackend) -> None:
    logits, asked = batch(1499, 3.0)
    padded = torch.cat([logits, torch.full((len(asked), 5), 1e9)], dim=1)
    assert sampler(backend, 1499).sample(padded, asked) == sampler(backend, 1499).sample(logits, asked)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 12345])
def test_noise_is_that_of_seed_and_position(backend: CPUBackend, seed: int) -> None:
    """Equal logits: the id tells the noise."""
    asked = [make_request(str(n), output=[5] * n, seed=seed) for n in range(8)]
    got = sampler(backend, VOCAB).sample(torch.zeros(8, VOCAB), asked)
    assert [token_of(one) for one in got] == [int(uniform(seed, r.num_tokens) * VOCAB) for r in asked]


# ---------------------------------------------------------------------------- rows and requests of all sorts

strange_logits = st.sampled_from(
    [-0.0, 1e30, 3.4e38, -3.4e38, 1e-38, -math.inf, -math.inf, math.inf, math.nan]
)


@st.composite
def rows(draw: Any, vocab: int) -> torch.Tensor:
    """Coarse steps make ties, wide scales make zero weights; a few logits are strange."""
    scale, step = draw(st.sampled_from([0.0, 0.1, 3.0, 40.0])), draw(st.sampled_from([0.0, 0.25, 2.0]))
    logits_V = (
        torch.randn(vocab, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**32)))) * scale
    )
    if step:
        logits_V = (logits_V / step).round() * step
    for place, logit in draw(st.lists(st.tuples(st.integers(0, vocab - 1), strange_logits), max_size=3)):
        logits_V[place] = logit
    return logits_V


@st.composite
def requests(draw: Any, vocab: int, name: str) -> Request:
    ids = st.integers(-2, vocab + 2)
    params = {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "temperature": st.one_of(st.sampled_from([0.0, 1e-9, 1e-5, 1.0]), st.floats(0.0, 2.0)),
        "top_k": st.integers(-1, vocab + 5),
        "top_p": st.one_of(st.sampled_from([1e-300, 1e-9, 1.0]), st.floats(1e-6, 1.0)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
        "repetition_penalty": st.one_of(st.just(1.0), st.floats(1e-3, 2.0)),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4),
        "bad_words": st.lists(st.lists(ids, max_size=3).map(tuple), max_size=6).map(tuple),
        "allowed_token_ids": st.one_of(st.none(), st.lists(ids, max_size=4).map(tuple)),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.lists(ids, max_size=4).map(tuple),
        "logprobs": st.one_of(st.none(), st.integers(0, vocab + 3)),
    }
    chosen = draw(st.fixed_dictionaries({}, optional=params))
    output = draw(st.lists(st.integers(0, vocab - 1), max_size=5))
    return make_request(name, prompt=[0], output=output, **chosen)


@given(data=st.data(), vocab=st.sampled_from([1, 2, 12, 63, 64, 65, 300, 1100]), count=st.integers(1, 4))
@settings(max_examples=examples(120))
def test_whatever_the_row_and_the_request(
    backend: CPUBackend, data: st.DataObject, vocab: int, count: int
) -> None:
    logits = torch.stack([data.draw(rows(vocab)) for _ in range(count)])
    asked = [data.draw(requests(vocab, str(row))) for row in range(count)]
    expected = Sampler(vocab, CPU).sample(logits, asked)
    assert_equal(sampler(backend, vocab, 2).sample(logits, asked), expected)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.25, 1), (0.75, 3), (0.5 + 1e-9, 3)])
def test_the_smallest_nucleus_that_reaches_top_p_is_kept(
    backend: CPUBackend, top_p: float, kept: int
) -> None:
    drawing = sampler(backend, 4)
    asked = [make_request(str(seed), top_p=top_p, seed=seed) for seed in range(60)]
    drawn = drawing.sample(torch.zeros(len(asked), 4), asked)
    assert {token_of(one) for one in drawn} == set(range(kept))


# ---------------------------------------------------------------------------- logprobs


@pytest.mark.parametrize("top", [0, 1, 20, 300, 6000])
@pytest.mark.parametrize("rounding", [0.0, 0.5, 1000.0])
def test_prompt_logprobs(backend: CPUBackend, top: int, rounding: float) -> None:
    vocab = 5000
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(top)) * 4
    if rounding:
        logits = (logits / rounding).round() * rounding
    logits[3, 17], logits[4, 18], logits[5, 19] = math.nan, math.inf, -math.inf
    ids = [0, 7, vocab - 1, 3, 29, 19, 2500, 63, 64]
    got = sampler(backend, vocab).prompt_logprobs(logits, ids, top)
    expected = Sampler(vocab, CPU).prompt_logprobs(logits, ids, top)
    assert_equal([SampledToken(0, entry) for entry in got], [SampledToken(0, entry) for entry in expected])
    assert [entry.token_id for entry in got] == ids


def test_logprobs_of_some_rows_alone(backend: CPUBackend) -> None:
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(1)) * 3
    asked = [
        make_request(str(n), temperature=0.0, **({"logprobs": n} if n in {1, 2, 5} else {})) for n in range(7)
    ]
    got = sampler(backend, 3000).sample(logits, asked)
    assert_equal(got, Sampler(3000, CPU).sample(logits, asked))
    assert [len(one.logprobs.top) for one in got if one.logprobs] == [1, 2, 5]
