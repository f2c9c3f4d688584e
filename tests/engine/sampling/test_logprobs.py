import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.sampling import Sampler
from support.lanes import examples
from support.sampling import CPU, make_request, sample_one

torch.set_num_threads(1)


def random_logits(rows: int, vocab_size: int, *, step: float = 0.0) -> torch.Tensor:
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows)) * 4
    return torch.round(logits / step) * step if step else logits


@pytest.mark.parametrize("vocab_size", [30, 300, 5000])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_prompt_logprobs_equal_log_softmax(vocab_size, top):
    logits = random_logits(6, vocab_size)
    ids = [0, 7, vocab_size - 1, 3, 29, 11]
    expected = logits.double().log_softmax(-1)
    for row, entry in enumerate(Sampler(vocab_size, CPU).prompt_logprobs(logits, ids, top)):
        assert entry.token_id == ids[row]
        assert entry.logprob == pytest.approx(expected[row, ids[row]].item(), abs=2e-6)
        assert entry.rank == 1 + (logits[row] > logits[row, ids[row]]).sum()
        best = expected[row].topk(top)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=2e-6)


@given(st.integers(0, 1499), st.integers(0, 40), st.sampled_from([0.0, 0.5, 4.0, 1000.0]))
@settings(max_examples=examples(80))
def test_ties_rank_by_lowest_id(token, top, step):
    """Coarse steps up to rows that are all equal."""
    logits = random_logits(1, 1500, step=step)
    values = logits[0].tolist()
    order = sorted(range(1500), key=lambda i: (-values[i], i))
    [entry] = Sampler(1500, CPU).prompt_logprobs(logits, [token], top)
    assert entry.rank == order.index(token) + 1
    assert [i for i, _ in entry.top] == order[:top]


def test_the_chosen_token_is_rank_one_of_top_when_greedy():
    logits = random_logits(1, 100)[0]
    result = sample_one(logits, make_request(temperature=0.0, logprobs=3))
    assert result.logprobs.rank == 1
    assert result.logprobs.top[0] == (result.token_id, result.logprobs.logprob)


def test_logprobs_are_of_the_untouched_logits():
    logits = torch.tensor([1.0, 0.0, -1.0])
    request = make_request(
        temperature=0.0, logprobs=2, logit_bias={2: 100.0}, repetition_penalty=2.0, prompt=[0], output=[1]
    )
    result = sample_one(logits, request)
    assert result.token_id == 2
    assert result.logprobs.rank == 3
    assert result.logprobs.logprob == pytest.approx(logits.log_softmax(-1)[2].item(), abs=1e-6)
    assert [i for i, _ in result.logprobs.top] == [0, 1]


def test_absent_logprobs_are_none():
    assert sample_one(torch.zeros(4), make_request()).logprobs is None
    assert sample_one(torch.zeros(4), make_request(logprobs=0)).logprobs.top == []


def test_a_broken_prompt_row_has_nan_and_its_neighbors_do_not():
    logits = random_logits(3, 50)
    logits[1, 8] = math.nan
    entries = Sampler(50, CPU).prompt_logprobs(logits, [1, 2, 3], 2)
    assert [math.isnan(entry.logprob) for entry in entries] == [False, True, False]
    assert entries[1].rank == 0
    assert entries[1].top == []


def test_an_impossible_token_has_minus_infinity():
    [entry] = Sampler(3, CPU).prompt_logprobs(torch.tensor([[0.0, -math.inf, 1.0]]), [1], 3)
    assert entry.logprob == -math.inf
    assert entry.rank == 3
