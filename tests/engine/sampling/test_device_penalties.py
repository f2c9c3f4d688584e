"""Rules in the kernel that draws, over steps that know a token less than the device."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from llmbox.engine.device.device import Uploader
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling.device_penalties import LEAST, DevicePenalties, build_entries, match_bad_words
from llmbox.engine.sampling.logits_processors import LogitsProcessors, apply_rules
from llmbox.engine.sampling_params import SamplingParams
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.sampling.penalties import edit
from support.device_steps import Steps, alike
from support.lanes import NIGHTLY
from support.late_device import LateDevice
from support.sampling import make_request
from support.triton_interpreter import turn_on

turn_on()

CPU = torch.device("cpu")
OPS = triton_ops(CPU, torch.float32)
V = 4500
"""More than a chunk of the kernel."""


def any_params(data, number):
    some = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    return {
        "temperature": some(0.0, 0.7, 1.5),
        "top_k": some(0, 0, 1, 40),
        "top_p": some(1.0, 0.9),
        "min_p": some(0.0, 0.1),
        "seed": data.draw(st.integers(0, 1 << 63)),
        "repetition_penalty": some(1.0, 1.3, 0.8),
        "presence_penalty": some(0.0, 0.7, -0.4),
        "frequency_penalty": some(0.0, 1.1),
        "logit_bias": some({}, {3: 5.0, 4400: 6.0, 9: -100.0}),
        "bad_words": some((), ((5,), (3, 4), (4400, 3), (1, 2, 3, 4))),
        "allowed_token_ids": some(None, None, tuple(range(1500)), (3, 4, 4400, V + 3)),
        "min_tokens": some(0, 2),
        "stop_token_ids": some((), (3, 4400, V + 1)),
        "logprobs": some(None, 0, 2),
        "prompt": [number, 1, 2, 4400],
    }


@settings(max_examples=8 if NIGHTLY else 4)  # each takes a second
@given(data=st.data(), seed=st.integers(0, 1 << 30))
def test_every_mix_of_rules_step_by_step(data, seed):
    generator = torch.Generator().manual_seed(seed)
    coarse = data.draw(st.sampled_from([1, 50]))
    requests = [make_request(f"r{n}", **any_params(data, n)) for n in range(data.draw(st.integers(1, 3)))]
    steps = Steps(OPS, V, requests, LateDevice(), late=data.draw(st.booleans()))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    favorites = torch.zeros(V)
    favorites[[3, 4, 4400]] = 9.0
    for _ in range(2):
        noise_SV = (torch.randn(len(requests), V, generator=generator) * 2 * coarse).round() / coarse
        logits_SV = (noise_SV + favorites).to(dtype)
        before = logits_SV.clone()
        wanted = Sampler(V, CPU).sample(logits_SV, steps.known)
        found = steps.draw(logits_SV)
        assert all(map(alike, found, wanted)), (found, wanted)
        assert torch.equal(logits_SV, before), "the model's logits are put back"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_changed_logits_are_those_of_the_sampler_bit_by_bit(dtype):
    """Penalties on ids often drawn, never drawn and of the prompt; on zeros, infinities and huge numbers."""
    generator = torch.Generator().manual_seed(int(seed := torch.randint(1 << 30, ())))
    ids = torch.randint(V, (40,), generator=generator).tolist()
    request = make_request(
        prompt=ids[:25],
        output=[*ids[20:], ids[30], ids[30]],
        repetition_penalty=1.37,
        frequency_penalty=0.61,
        presence_penalty=-0.23,
        logit_bias=dict.fromkeys(ids[10:35], 0.77) | {V + 1: 3.0},
        bad_words=((ids[12],), (ids[30], ids[13]), (8, ids[14])),
    )
    steps = Steps(OPS, V, [request], LateDevice(), late=False)
    row_S, position_S = steps.note()
    row_V = 4 * torch.randn(V, generator=generator)
    row_V[ids[:5]] = torch.tensor([0.0, -0.0, -torch.inf, 6e4, -6e4])
    row_V = row_V.to(dtype)
    wanted_1V = row_V.to(torch.float32, copy=True)[None]
    rules = LogitsProcessors(request, V)
    assert rules.refresh()
    apply_rules(wanted_1V, [rules])

    lists = steps.rows.rules
    marks_3N, values_3N = lists._marks_3N, lists._values_3N
    left_1V = row_V[None].clone()
    edit(left_1V, position_S, lists.of(row_S, steps.rows.last_R, [request]))
    count = int(lists._facts_R5[row_S[0], 1])
    listed = marks_3N[0, :count].long()
    assert len(set(listed.tolist())) == count
    assert (left_1V[0, listed] == -torch.inf).all()
    assert torch.equal(values_3N[1, :count], row_V[listed].float())
    found_1V = left_1V.float()
    found_1V[0, listed] = values_3N[2, :count]
    assert torch.equal(found_1V, wanted_1V), seed


def test_a_long_list_moves_to_a_larger_place_with_its_counts():
    """A neighbor takes the place that it left."""
    request = make_request(
        prompt=range(LEAST - 4), repetition_penalty=2.0, frequency_penalty=1.0, temperature=0.0
    )
    late = Steps(OPS, V, [request], LateDevice(), late=True)
    favorite = [*range(1000, 1004), 1000, 1004, 1000, 1005, 1006, 1007]
    for token in favorite:
        logits_1V = torch.zeros(1, V)
        logits_1V[0, token] = 100.0
        (found,) = late.draw(logits_1V)
        assert found.token_id == token
    lists = late.rows.rules
    lists.take(1, make_request("other", logit_bias={2: 1.0}))
    late.note()
    first, count = lists._facts_R5[next(iter(late.rows._held.values())).row, :2].tolist()
    assert (first, count) == (LEAST, LEAST - 4 + 7)
    held = dict(zip(*lists._marks_3N[:2, first : first + count].tolist(), strict=True))
    assert held == dict.fromkeys(range(LEAST - 4), 0) | Counter(favorite[:-1])
    assert lists._marks_3N[0, 0] == 2, "the neighbor's"


class Launches(TorchDispatchMode):
    """How many operations a device would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def moved_at_once(rows: int) -> int:
    """All of them outgrow their places in one step -> operations. One has twice the place of the others, and
    leaves it to the next."""
    rules, uploader = DevicePenalties(rows, V, CPU), Uploader(LateDevice(), 3, 1 << 22)
    sizes = [2 * LEAST, *[LEAST] * (rows - 1)]
    for row, size in enumerate(sizes):
        listed = range(row, row + size - 1)
        rules.take(row, make_request(prompt=listed, repetition_penalty=2.0))
    uploader.begin_step()
    rules.flush(uploader)
    for row, size in enumerate(sizes):
        rules.draws(row, size - 1)
    uploader.begin_step()
    rules.flush(uploader)
    for row, size in enumerate(sizes):
        rules.draws(row, size)
    uploader.begin_step()
    with Launches() as launches:
        rules.flush(uploader)
    assert rules._places[1].start == 0, "where the first one was"
    for row, size in enumerate(sizes):
        first, count = rules._facts_R5[row, :2].tolist()
        assert rules._marks_3N[0, first : first + count].tolist() == list(range(row, row + size - 1))
    return launches.count


def test_lists_that_outgrow_their_places_together_move_together():
    assert moved_at_once(40) == moved_at_once(3)


def test_places_are_used_again():
    """By whoever has the row next; one without rules leaves none there."""
    rules = DevicePenalties(3, V, CPU)
    uploader = Uploader(LateDevice(), 3)
    for turn in range(20):
        for row in range(3):
            rules.take(row, make_request(str(turn), logit_bias={turn: 1.0} if (turn + row) % 2 else {}))
        uploader.begin_step()
        rules.flush(uploader)
    assert rules._end == 2 * LEAST
    assert rules._facts_R5[:, 1].tolist() == [1, 0, 1]
    held = rules._marks_3N[0][rules._facts_R5[[0, 2], 0]]
    assert held.tolist() == [19, 19]


def test_entries_name_each_id_once():
    request = make_request(
        prompt=[5, 6, 5],
        output=[6, 7, 7],
        repetition_penalty=1.2,
        logit_bias={7: 2.0, 9: -1.0, V: 4.0},
        bad_words=((9,), (6, 7), (6, V + 1), ()),
        stop_token_ids=(5, 11, V),
        min_tokens=4,
    )
    entries = build_entries(request, V)
    told = zip(entries.ids, entries.counts, entries.flags, entries.biases, strict=True)
    assert set(told) == {(5, 0, 2, 0.0), (6, 1, 0, 0.0), (7, 2, 0, 2.0), (9, -1, 1, -1.0), (11, -1, 2, 0.0)}
    assert entries.until == 7
    assert match_bad_words(request, V) == []
    request.token_ids.append(6)
    assert match_bad_words(request, V) == [(-1, 7)]
    request.num_pending = 2
    assert match_bad_words(request, V) == [(6, 7)], "whatever was drawn since"


def test_rows_without_rules_ask_for_no_list():
    rules = DevicePenalties(2, V, CPU)
    plain = make_request()
    assert plain.params == SamplingParams(max_tokens=100)
    assert rules.of(torch.tensor([0]), torch.zeros(3, dtype=torch.int64), [plain]) is None
