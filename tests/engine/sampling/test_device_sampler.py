"""The sampler of devices draws what that of hosts draws; noise of rows is the noise of one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.core.request import Request
from llmbox.engine.core.step import ScheduledRequest
from llmbox.engine.device.device import Uploader
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling.device_sampler import DeviceSampler
from llmbox.engine.sampling.device_state import DeviceRequestState
from llmbox.engine.sampling.sampler import sampling_kinds
from llmbox.engine.sampling_params import SamplingParams
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.reference.sampling import likeliest, uniform_rows
from support.lanes import examples
from support.late_device import LateDevice
from support.noise import uniform
from support.sampling import make_request

CPU = torch.device("cpu")
VOCAB = 700


def draw(logits, requests):
    """Through rows on the device, as a step does it."""
    rows = DeviceRequestState(len(requests), 1, 0, VOCAB, CPU)
    noted = [
        rows.stage_update(ScheduledRequest(one, 0, one.num_tokens, samples=True, admission=one.admissions))
        for one in requests
    ]
    uploader = Uploader(LateDevice(), 3)
    uploader.begin_step()
    rows.flush(uploader)
    row_S = torch.tensor(noted)
    position_S = torch.tensor([one.num_tokens for one in requests], dtype=torch.int32)
    drawing = DeviceSampler(REFERENCE, rows, VOCAB).draw(logits, requests, row_S, position_S)
    assert torch.equal(rows.last_R[row_S], drawing.numbers_SC[:, 0].long())
    return drawing.read(drawing.numbers_SC.tolist())


def plain(logits, requests):
    return Sampler(VOCAB, CPU).sample(logits, requests)


@settings(max_examples=examples(60))
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_every_mix_of_parameters(data, seed):
    """Coarse logits have ties at every border."""
    generator = torch.Generator().manual_seed(seed)
    count = data.draw(st.integers(1, 5))
    coarse = data.draw(st.sampled_from([1, 4, 1000]))
    logits = (torch.randn(count, VOCAB + 3, generator=generator) * 2 * coarse).round() / coarse
    requests = [
        make_request(
            f"r{row}",
            temperature=data.draw(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0])),
            top_k=data.draw(st.sampled_from([0, 1, 7, 300, 5000])),
            top_p=data.draw(st.sampled_from([1.0, 0.9, 0.3])),
            min_p=data.draw(st.sampled_from([0.0, 0.2])),
            seed=data.draw(st.integers(-(1 << 63), (1 << 64) - 1)),
            logit_bias=data.draw(st.sampled_from([{}, {5: 9.0}])),
            logprobs=data.draw(st.sampled_from([None, 0, 3])),
        )
        for row in range(count)
    ]
    assert draw(logits, requests) == plain(logits, requests)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.25, 1), (0.75, 3), (0.5 + 1e-9, 3)])
def test_the_smallest_nucleus_that_reaches_top_p_is_kept(top_p, kept):
    logits = torch.full((60, VOCAB), -1e4)
    logits[:, :4] = 0.0
    requests = [make_request(f"r{seed}", top_p=top_p, seed=seed) for seed in range(60)]
    assert {one.token_id for one in draw(logits, requests)} == set(range(kept))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_rows_fail_and_their_neighbors_do_not(broken):
    logits = torch.randn(3, VOCAB)
    logits[1, 5] = broken
    params = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5})
    requests = [make_request(f"r{n}", seed=n, **one) for n, one in enumerate(params)]
    seen = draw(logits, requests)
    assert isinstance(seen[1], str)
    assert [seen[0], seen[2]] == [plain(logits, requests)[0], plain(logits, requests)[2]]


def test_nothing_left_to_choose():
    request = make_request(allowed_token_ids=(5,), bad_words=((5,),), temperature=0.0)
    (seen,) = draw(torch.randn(1, VOCAB), [request])
    assert seen == plain(torch.randn(1, VOCAB), [request])[0]
    assert "no token is left" in seen


@given(seed=st.integers(-(1 << 63), (1 << 64) - 1), position=st.integers(0, (1 << 40)))
def test_noise_of_rows_is_the_noise_of_one(seed, position):
    signed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    found = uniform_rows(torch.tensor([signed]), torch.tensor([position]))
    assert found.tolist() == [uniform(seed, position)]


def test_likeliest_orders_equal_logits_by_id():
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -torch.inf, 3.0]]).repeat(1, 9)
    value, ids = likeliest(logits, 5)
    every_value, every_id = likeliest(logits, logits.shape[1])
    assert ids.tolist() == [[1, 3, 6, 8, 10]]
    assert torch.equal(every_id[:, :5], ids)
    assert torch.equal(every_value[:, :5], value)
    assert every_id[0, 36:54].tolist() == [i for i in range(63) if i % 7 in {2, 4}], "-0 equals 0"


def test_a_broken_logit_comes_first_whatever_its_sign():
    """The NaN of a CPU's 0 * inf is negative."""
    logits = torch.tensor([[1.0, torch.inf, 3.0, torch.nan, 0.0], [-torch.nan, 1.0, 2.0, 3.0, torch.inf]])
    value, ids = likeliest(logits, 1)
    assert ids.tolist() == [[3], [0]]
    assert value.isnan().all()


def test_needs():
    def needs(**params):
        return sampling_kinds([SamplingParams(max_tokens=1, **params)], VOCAB)

    assert needs(temperature=0.0, top_p=0.5).candidates == 0
    assert needs(temperature=1.0).whole
    assert needs(top_k=20).candidates == 20
    assert needs(top_k=20, top_p=0.5).candidates == 20
    assert needs(top_p=0.5).candidates == VOCAB
    assert needs(top_k=VOCAB).whole


def test_a_request_class_is_hashed_by_identity():
    """Rows are found by it: two requests of one name are two."""
    one, other = (Request(request_id="a", prompt_ids=[1], params=SamplingParams(max_tokens=1)) for _ in "ab")
    assert len({one, other}) == 2


def test_rows_behind_a_wrong_draft_have_log_probabilities():
    """They mean nothing, but are read like others; kernels leave those undefined that nobody wants."""
    rows = DeviceRequestState(2, 1, 0, VOCAB, CPU)
    sampling = rows.sampling(torch.tensor([rows.spare]), torch.tensor([5]))
    assert sampling.logprobs.tolist() == [1]
