"""Rows whose logits are in parts are drawn as whole rows are, ties and faults included."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from llmbox.engine.core.request import Request
from llmbox.engine.distributed.communicator import TensorParallel
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling_params import SamplingParams
from support.rank_threads import Stage
from support.shared_logits import CPU, KNOBS, Counting, part_of, requests_of


def sample_in_parts(logits_RV, requests, tp):
    """What each rank draws, and the bytes that it sends."""
    vocab = logits_RV.shape[1]
    stage = [Stage(tp)]

    def work(number):
        layout = ParallelLayout(tp, 1, number)
        collective, part = Counting(layout, stage), layout.vocabulary(vocab)
        mine = part_of(logits_RV, part)
        sampler = Sampler(vocab, CPU, rank=TensorParallel(layout, collective))
        return sampler.sample(mine, requests), collective.bytes

    with ThreadPoolExecutor(tp) as pool:
        picks, sizes = zip(*pool.map(work, range(tp)), strict=True)
    assert all(each == picks[0] for each in picks)
    return picks[0], max(sizes)


@pytest.mark.parametrize("vocab", [700, 2051, 4099])
@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("flat", [0.1, 1.0, 4.0])
def test_parts_draw_what_the_whole_draws(vocab, tp, flat):
    generator = torch.Generator().manual_seed(vocab + tp)
    requests = requests_of(5 * len(KNOBS), tp)
    logits_RV = flat * torch.randn(len(requests), vocab, generator=generator)
    found, _ = sample_in_parts(logits_RV, requests, tp)
    assert found == Sampler(vocab, CPU).sample(logits_RV, requests)


def test_equal_logits_go_by_lowest_id_across_ranks():
    generator = torch.Generator().manual_seed(1)
    requests = requests_of(4 * len(KNOBS))
    logits_RV = torch.randint(0, 4, (len(requests), 1500), generator=generator).float()
    logits_RV[:10] = 2.0
    found, _ = sample_in_parts(logits_RV, requests, 4)
    assert found == Sampler(1500, CPU).sample(logits_RV, requests)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1400])
def test_a_broken_row_fails_alone(poison, place):
    requests = requests_of(2 * len(KNOBS))
    logits_RV = torch.randn(len(requests), 1500, generator=torch.Generator().manual_seed(2))
    for row in range(len(KNOBS)):
        logits_RV[row, place] = poison
    found, _ = sample_in_parts(logits_RV, requests, 3)
    assert found == Sampler(1500, CPU).sample(logits_RV, requests)
    assert [isinstance(pick, str) for pick in found] == [row < len(KNOBS) for row in range(len(requests))]


def test_what_is_sent_for_a_row():
    """Its logits to the rank that draws it, and what that rank found to all."""
    vocab = 151_936
    logits_RV = 4 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(3))

    def sent(**params):
        request = Request(request_id="a", prompt_ids=[1], params=SamplingParams(max_tokens=1, **params))
        return sample_in_parts(logits_RV, [request], 2)[1]

    assert sent(temperature=0.9, top_k=50) == vocab * 2 + 3 * 8
    assert sent(temperature=0.0, logprobs=1) == vocab * 2 + (3 + 4 + 2) * 8
