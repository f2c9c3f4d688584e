"""Rows whose logits are in parts on devices are drawn as whole rows are."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from llmbox.engine.core.step import ScheduledRequest
from llmbox.engine.device.device import Uploader
from llmbox.engine.distributed.communicator import TensorParallel, rows_of_rank
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling.device_sampler import DeviceSampler
from llmbox.engine.sampling.device_state import DeviceRequestState
from llmbox.kernels.reference import REFERENCE
from support.late_device import LateDevice
from support.rank_threads import Stage, ThreadCollective
from support.shared_logits import CPU, KNOBS, part_of, requests_of


def sample_in_parts(logits_SV, requests, tp):
    """What each rank draws."""
    vocab, stage = logits_SV.shape[1], [Stage(tp)]

    def work(number):
        rows = DeviceRequestState(len(requests), 1, 0, vocab, CPU)
        planned = [ScheduledRequest(one, 0, one.num_tokens, True, one.admissions) for one in requests]
        row_S = torch.tensor([rows.stage_update(one) for one in planned])
        uploader = Uploader(LateDevice(), 3)
        uploader.begin_step()
        rows.flush(uploader)
        position_S = torch.tensor([one.num_tokens for one in requests], dtype=torch.int32)
        layout = ParallelLayout(tp, 1, number)
        collective = ThreadCollective(layout, stage)
        sampler = DeviceSampler(REFERENCE, rows, vocab, TensorParallel(layout, collective))
        mine = part_of(logits_SV, layout.vocabulary(vocab))
        drawing = sampler.draw(mine, requests, row_S, position_S)
        assert torch.equal(rows.last_R[row_S], drawing.ids_S)
        assert torch.equal(drawing.ids_S, drawing.numbers_SC[:, 0].long())
        return drawing.read(drawing.numbers_SC.tolist())

    with ThreadPoolExecutor(tp) as pool:
        picks = list(pool.map(work, range(tp)))
    assert all(each == picks[0] for each in picks)
    return picks[0]


@pytest.mark.parametrize("vocab", [700, 2051])
@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("flat", [0.1, 4.0])
def test_parts_draw_what_the_whole_draws(vocab, tp, flat):
    generator = torch.Generator().manual_seed(vocab + tp)
    requests = requests_of(4 * len(KNOBS), tp)
    logits_SV = flat * torch.randn(len(requests), vocab, generator=generator)
    found = sample_in_parts(logits_SV, requests, tp)
    assert found == Sampler(vocab, CPU).sample(logits_SV, requests)


def test_equal_logits_go_by_lowest_id_across_ranks():
    generator = torch.Generator().manual_seed(1)
    requests = requests_of(4 * len(KNOBS))
    logits_SV = torch.randint(0, 4, (len(requests), 1500), generator=generator).float()
    logits_SV[:10] = 2.0
    found = sample_in_parts(logits_SV, requests, 4)
    assert found == Sampler(1500, CPU).sample(logits_SV, requests)


@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1400])
def test_a_broken_row_fails_alone(poison, place):
    requests = requests_of(2 * len(KNOBS))
    logits_SV = torch.randn(len(requests), 1500, generator=torch.Generator().manual_seed(2))
    logits_SV[: len(KNOBS), place] = poison
    found = sample_in_parts(logits_SV, requests, 3)
    assert found == Sampler(1500, CPU).sample(logits_SV, requests)
    assert [isinstance(pick, str) for pick in found] == [row < len(KNOBS) for row in range(len(requests))]


@pytest.mark.parametrize("tp", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_rows_are_dealt_out_once_and_evenly(rows, tp):
    shares = [list(range(rows))[rows_of_rank(rows, tp, rank)] for rank in range(tp)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) == -(-rows // tp)
