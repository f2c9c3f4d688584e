"""Sampling and step inputs on the device against the engine's own sampler and arithmetic."""

import math

import pytest
import torch

from llmbox.kernels.reference.sampling import SamplingKinds, rank_tokens, sample_rows
from llmbox.kernels.sampling_types import DecodeInputs, DecodeRows
from llmbox.kernels.triton.sampling.sample import prepare_decode_inputs, sample
from support.sampling import sample_rows_by

V = 333
Row = tuple[float, int, float, float]
"""Temperature, top-k, top-p, min-p."""


SPREAD = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.05), (1.3, 0, 0.95, 0.0)]
TIES = [(0.0, 0, 1.0, 0.0), (1.0, 9, 1.0, 0.0), (2.0, 0, 0.4, 0.0), (0.5, 0, 0.0, 0.0)]


@pytest.mark.parametrize(("rows", "levels"), [(SPREAD, None), (TIES, 3)])
def test_draws_what_the_sampler_draws(rows: list[Row], levels: int | None) -> None:
    seed = int(torch.randint(1 << 62, ()))  # new each time: it is in the message of a failure
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(rows), V, generator=generator)
    if levels is not None:
        logits = torch.randint(levels, (len(rows), V), generator=generator).float()
        logits[1, ::2] = -0.0
        logits[2, ::3] = -torch.inf
    seeds, positions = [seed, -seed, 7, 1 << 40], [1, 2, (1 << 33) + 5, 77]
    asked = sample_rows_by(rows, seeds, positions)
    got = sample(logits, asked)
    want, _ = sample_rows(logits, asked, SamplingKinds(whole=True, candidates=V))
    assert got.ids.tolist() == want.tolist(), seed
    best, total, logit, rank = rank_tokens(logits, want, 0).stats_S4.unbind(1)
    assert torch.equal(got.raw_best.double(), best)
    torch.testing.assert_close(got.total.double(), total, rtol=1e-6, atol=2)
    assert torch.equal(got.logit.double(), logit)
    assert torch.equal(got.rank.double(), rank)


def test_a_broken_row_is_told_and_hurts_no_other() -> None:
    logits = torch.randn(4, V)
    logits[0, 5], logits[1, 300], logits[2] = torch.nan, torch.inf, -torch.inf
    got = sample(logits, sample_rows_by([(1.0, 0, 0.9, 0.0)] * 3 + [(0.0, 0, 1.0, 0.0)], [1] * 4, [1] * 4))
    assert got.best[0].isnan()
    assert got.best[1:3].tolist() == [math.inf, -math.inf]
    assert int(got.ids[3]) == int(logits[3].argmax())


def test_rows_advance_on_the_device() -> None:
    rows = DecodeRows(
        ids_R=torch.tensor([7, 8, 9]),
        lengths_R=torch.tensor([16, 0, 33], dtype=torch.int32),
        tables_RB=torch.tensor([[4, 6, 0], [0, 0, 0], [1, 2, 3]], dtype=torch.int32),
    )
    inputs = DecodeInputs(*(torch.full((3,), -9, dtype=torch.int32) for _ in range(3)))
    prepare_decode_inputs(rows, None, inputs, 16)
    assert inputs.positions_R.tolist() == [15, 0, 32]
    assert inputs.slots_R.tolist() == [4 * 16 + 15, -1, 3 * 16]
    assert inputs.context_lens_R.tolist() == [16, 0, 33]
    prepare_decode_inputs(rows, torch.tensor([70, 80, 90]), inputs, 16)
    assert rows.ids_R.tolist() == [70, 8, 90]
    assert rows.lengths_R.tolist() == [17, 0, 34]
    assert inputs.slots_R.tolist() == [6 * 16, -1, 3 * 16 + 1]
