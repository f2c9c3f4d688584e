"""Rounding with feedback: a grid like any other, nearer in what a linear computes."""

import pytest
import torch
from torch import Tensor

from llmbox.engine.quantize.quantizer import GptqQuantizer
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.weight_packing import QuantizedWeight, round_with_steps, to_nibbles, to_numbers


def rows(count: int, inputs: int) -> Tensor:
    """Related to each other, as activations are, and of unlike sizes."""
    mix = torch.randn(inputs // 2, inputs) * torch.rand(inputs).exp()
    return torch.randn(count, inputs // 2) @ mix + 0.3 * torch.randn(count, inputs)


def lost(weight_OI: Tensor, rounded: QuantizedWeight, x_TI: Tensor) -> float:
    return float(((weight_OI - rounded.floats()) @ x_TI.T).square().sum())


def nearest(weight_OI: Tensor) -> QuantizedWeight:
    inputs = weight_OI.shape[1]
    groups = torch.nn.functional.pad(weight_OI, (0, -inputs % 128)).view(len(weight_OI), -1, 128)
    numbers, scales, steps = round_with_steps(groups, QUANTS["int4"])
    return QuantizedWeight(QUANTS["int4"], numbers.flatten(1)[:, :inputs], scales, steps_OS=steps.flatten(1))


def test_products_of_other_rows_are_nearer_than_those_of_nearest_weights():
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96), rows(3000, 96)
    seen, other = x[:2000], x[2000:]
    rounded = GptqQuantizer.of(seen.T @ seen / len(seen)).round(QUANTS["int4"], weight)
    assert lost(weight, rounded, other) < 0.6 * lost(weight, nearest(weight), other)


def test_inputs_that_know_nothing_of_each_other_leave_the_nearest_weights():
    torch.manual_seed(1)
    weight = torch.randn(8, 64)
    rounded, wanted = GptqQuantizer.of(torch.eye(64) * 3).round(QUANTS["int4"], weight), nearest(weight)
    torch.testing.assert_close(rounded.scales_OG, wanted.scales_OG)
    # Ours are nearest with the scale as it is stored, theirs with the one before its last correction.
    assert (rounded.codes_OI != wanted.codes_OI).float().mean() < 0.02
    assert (weight - rounded.floats()).norm() <= (weight - wanted.floats()).norm()


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4", "int4-g128"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 77), (2, 129)])
def test_odd_shapes_and_groups_that_do_not_divide(name: str, shape: tuple[int, int]):
    torch.manual_seed(2)
    quant, weight = QUANTS[name], torch.randn(shape)
    x = torch.randn(200, shape[1])
    rounded = GptqQuantizer.of(x.T @ x / 200).round(quant, weight)
    assert rounded.codes_OI.shape == shape
    assert rounded.scales_OG.shape == (shape[0], quant.groups(shape[1]))
    if rounded.steps_OS is None:
        assert rounded.codes_OI.int().abs().max() <= 1 << (quant.bits - 1)
    else:
        halves = to_nibbles(rounded.codes_OI, rounded.steps_OS, quant)
        assert torch.equal(to_numbers(halves, rounded.steps_OS, quant), rounded.codes_OI)
    assert (weight - rounded.floats()).norm() < {8: 0.02, 4: 0.2}[quant.bits] * weight.norm()


@pytest.mark.parametrize("seen", [0, 1, 3])
def test_fewer_rows_than_inputs_and_dead_inputs_still_give_weights(seen: int):
    """The moments have no inverse then."""
    torch.manual_seed(3)
    weight, x = torch.randn(4, 64), torch.randn(seen, 64)
    x[:, 5] = 0
    rounded = GptqQuantizer.of(x.T @ x / max(seen, 1)).round(QUANTS["int4"], weight)
    assert (weight - rounded.floats()).norm() < weight.norm()
    assert rounded.scales_OG.isfinite().all()


def test_zeros_stay_zeros():
    rounded = GptqQuantizer.of(torch.eye(40)).round(QUANTS["int4"], torch.zeros(2, 40))
    assert not rounded.floats().any()
