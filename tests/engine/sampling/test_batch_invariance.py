"""A row's result is the same alone, in any batch, and however the batch is cut into parts."""

import pytest
import torch

from llmbox.engine.sampling import Sampler
from support.sampling import CPU, make_request

torch.set_num_threads(1)

ROWS = 33
KINDS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "min_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.9},
    {"top_k": 40, "top_p": 0.95, "logprobs": 5},
    {"top_k": 700},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5, "logprobs": 20},
    {"logit_bias": {5: 100.0, 7: -100.0}, "top_k": 3},
    {"allowed_token_ids": tuple(range(0, 1499, 7)), "bad_words": ((7,), (3, 14)), "top_p": 0.5},
    {"min_tokens": 9, "stop_token_ids": (0, 1, 2), "temperature": 1.3},
]


def batch(vocab_size: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(ROWS, vocab_size, generator=generator) * 3).to(dtype)
    logits[17, 100] = torch.nan
    logits[23, 4] = torch.inf
    requests = [
        make_request(str(row), output=[row, 3, row % 5 + 900], seed=row * 7919, **KINDS[row % len(KINDS)])
        for row in range(ROWS)
    ]
    return logits, requests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1499, 1536])
def test_alone_as_in_a_mixed_batch(dtype, vocab_size):
    logits, requests = batch(vocab_size, dtype)
    together = Sampler(vocab_size, CPU).sample(logits, requests)
    alone = [
        Sampler(vocab_size, CPU).sample(logits[row : row + 1].clone(), [requests[row]])[0]
        for row in range(ROWS)
    ]
    assert together == alone
    assert [row for row in range(ROWS) if isinstance(together[row], str)] == [17, 23]


@pytest.mark.parametrize("rows_at_once", [1, 5, 64])
def test_parts_of_any_size(rows_at_once):
    logits, requests = batch(1499, torch.float32)
    expected = Sampler(1499, CPU).sample(logits, requests)
    sampler = Sampler(1499, CPU)
    sampler._rows_at_once = rows_at_once
    assert sampler.sample(logits, requests) == expected
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = sampler.sample(logits[order], [requests[row] for row in order])
    assert shuffled == [expected[row] for row in order]


def test_threads_do_not_matter():
    logits, requests = batch(1536, torch.float32)
    expected = Sampler(1536, CPU).sample(logits, requests)
    torch.set_num_threads(2)
    try:
        assert Sampler(1536, CPU).sample(logits, requests) == expected
    finally:
        torch.set_num_threads(1)


def test_logits_are_left_alone_and_padding_is_ignored():
    logits, requests = batch(1499, torch.float32)
    padded = torch.cat([logits, torch.full((ROWS, 5), 1e9)], dim=1)
    before = padded.clone()
    assert Sampler(1499, CPU).sample(padded, requests) == Sampler(1499, CPU).sample(logits, requests)
    assert torch.allclose(padded, before, equal_nan=True)


def test_resumed_requests_draw_the_same_tokens():
    """Tokens drawn one by one equal those drawn after starting again from any point."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(64, 64, generator=generator) * 2
    params = {"seed": 42, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_p": 0.9}

    def go_on(output: list[int], until: int) -> list[int]:
        sampler, request = Sampler(64, CPU), make_request(output=output, **params)
        while request.num_output < until:
            [result] = sampler.sample(table[request.token_ids[-1]][None], [request])
            request.token_ids.append(result.token_id)
        return request.token_ids[request.num_prompt :]

    whole = go_on([], 40)
    assert len(set(whole)) > 10
    for cut in (1, 13, 39):
        assert go_on(whole[:cut], 40) == whole


def test_a_new_request_under_an_old_name_starts_afresh():
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    sampler = Sampler(3, CPU)
    penalised = {"temperature": 0.0, "presence_penalty": 1.0}
    assert sampler.sample(logits, [make_request(prompt=[2], output=[0], **penalised)])[0].token_id == 1
    assert sampler.sample(logits, [make_request(prompt=[2], output=[1], **penalised)])[0].token_id == 0


def test_no_rows():
    assert Sampler(8, CPU).sample(torch.zeros(0, 8), []) == []
    assert Sampler(8, CPU).prompt_logprobs(torch.zeros(0, 8), [], 3) == []
