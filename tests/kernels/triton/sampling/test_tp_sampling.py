"""Rows of logits in parts: the best ids of one, what its ids weigh, and where a sum of weights lies."""

import pytest
import torch

from llmbox.engine.sampling.draw import SamplingTensors, invert, weights_above
from llmbox.engine.sampling.philox import uniform
from llmbox.kernels.sampling_types import SampleRows
from llmbox.kernels.triton.sampling.tp_sampling import candidates, noise, weigh

V = 4300
"""Two chunks."""


def rows_of(temperatures: list[float], ks: list[int], min_ps: list[float]) -> SampleRows:
    count = len(temperatures)
    return SampleRows(
        temperature=torch.tensor(temperatures, dtype=torch.float64),
        top_k=torch.tensor(ks, dtype=torch.int32),
        top_p=torch.ones(count, dtype=torch.float64),
        min_p=torch.tensor(min_ps, dtype=torch.float64),
        seed=torch.arange(count) - 1,
        position=torch.arange(count) + (1 << 33),
        logprobs=torch.zeros(count, dtype=torch.int32),
    )


@pytest.mark.parametrize("levels", [None, 4])
def test_candidates_are_the_best_in_the_order_of_ids(levels: int | None) -> None:
    generator = torch.Generator().manual_seed(seed := int(torch.randint(1 << 30, ())))
    logits = torch.randn(5, V, generator=generator)
    if levels is not None:  # ties at the border; both zeros are one
        logits = torch.randint(-1, levels - 1, (5, V), generator=generator).float()
        logits[:, ::3] *= -1.0
    logits[4, 100:] = -torch.inf
    ks = [1, 1, 20, 32, 32]
    found = candidates(logits, rows_of([0.0, 1.0, 1.0, 2.0, 1.0], ks, [0.0] * 5), 32, 1000)
    values, ids = (found >> 32).to(torch.int32).view(torch.float32), found & 0xFFFFFFFF
    for row, k in enumerate(ks):
        order = torch.sort(logits[row], descending=True, stable=True).indices[:k].sort().values
        assert torch.equal(ids[row, :k] - 1000, order), seed
        assert torch.equal(values[row, :k], logits[row, order])
        assert (values[row, k:] == -torch.inf).all()


def test_a_broken_part_says_so_first() -> None:
    logits = torch.randn(3, V)
    logits[0, 4200], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    found = candidates(logits, rows_of([1.0] * 3, [8] * 3, [0.0] * 3), 16, 0)
    values = (found >> 32).to(torch.int32).view(torch.float32)
    assert values[0, 0].isnan()
    assert values[1:, 0].tolist() == [torch.inf, -torch.inf]
    assert (values[:, 1:] == -torch.inf).all()


def test_a_part_weighs_what_its_ids_weigh() -> None:
    """Its best is not the best of all; points beyond it give any column."""
    logits = 2 * torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    rows = rows_of([1.0, 0.5, 3.0, 0.0], [0] * 4, [0.0, 0.001, 0.05, 0.0])
    best = logits.amax(-1) + torch.tensor([0.0, 0.5, 1.0, 2.0])
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    knobs = SamplingTensors(temperature, torch.full((4,), V), rows.top_p, rows.min_p, rows.top_p)
    until = weights_above(logits, best[:, None], knobs).cumsum(-1)
    part = weigh(logits, best, rows)
    # The interpreter's exp may differ in its last bit.
    torch.testing.assert_close(part.total_R.double(), until[:, -1].double(), rtol=1e-6, atol=2)
    for share in (0.0, 0.3, 0.7, 0.999):
        point = (until[:, -1] * share).long()
        assert (part.columns(point) - invert(until, point)).abs().max() <= 1
    for point in (-(1 << 50), 1 << 60):
        beyond = part.columns(torch.full((4,), point))
        assert ((beyond >= 0) & (beyond < V)).all()


def test_noise_is_that_of_the_engine() -> None:
    rows = rows_of([1.0] * 3, [0] * 3, [0.0] * 3)
    numbers = zip(rows.seed.tolist(), rows.position.tolist(), strict=True)
    assert noise(rows).tolist() == [uniform(seed, position) for seed, position in numbers]
