"""Four bits with steps, in plain torch. That the C++ kernels do the same: `cpu/test_quantized_linear.py`."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.weight_packing import (
    PLAIN,
    QuantizedWeight,
    round_with_steps,
    step_and_zero,
    to_nibbles,
    to_numbers,
)

INT4 = QUANTS["int4"]


def rounded(weight_OI: Tensor) -> QuantizedWeight:
    numbers, scales, steps = round_with_steps(weight_OI.view(len(weight_OI), -1, 128), INT4)
    return QuantizedWeight(INT4, numbers.flatten(1), scales, steps_OS=steps.flatten(1))


def error(weight_OI: Tensor) -> float:
    return float((rounded(weight_OI).floats() - weight_OI).norm() / weight_OI.norm())


def test_a_plain_step_makes_minus_eight_to_seven() -> None:
    step, zero = step_and_zero(torch.tensor([PLAIN], dtype=torch.uint8))
    assert (step.item(), zero.item()) == (1, 8)


def test_numbers_and_halves_are_each_other_where_numbers_fit() -> None:
    bytes_S = torch.arange(256, dtype=torch.uint8)
    bytes_S = bytes_S[(bytes_S & 15) > 0]
    halves_OI = torch.arange(16, dtype=torch.uint8).expand(len(bytes_S), 16)
    step, zero = (each.unsqueeze(1) for each in step_and_zero(bytes_S))
    numbers = step * halves_OI.int() - zero
    fits = (numbers >= -128) & (numbers <= 127)
    again = to_nibbles(to_numbers(halves_OI, bytes_S.unsqueeze(1), INT4), bytes_S.unsqueeze(1), INT4)
    assert fits.float().mean() > 0.9
    assert torch.equal(again[fits], halves_OI[fits])


def test_the_error_is_three_quarters_of_one_scale_for_32_weights() -> None:
    weight = torch.randn(128, 512)
    groups = weight.view(-1, 32)
    scale = groups.abs().amax(1, keepdim=True) / 7.5
    plain = (groups / scale).round().clamp(-8, 7) * scale - groups
    assert error(weight) < 0.75 * float(plain.norm() / weight.norm())
    assert error(weight) < 0.065


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-4, 0.02, 30.0]),
    st.floats(-4, 4),
    st.floats(0, 40),
)
def test_whatever_the_weights_numbers_fit_and_nothing_is_far_off(
    seed: int, size: float, shift: float, outlier: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 256, generator=generator) + shift
    weight[:, 7] += outlier
    weight[:, 200] -= outlier
    weight *= size
    found = rounded(weight)
    assert found.steps_OS is not None
    step, zero = (each.repeat_interleave(16, 1) for each in step_and_zero(found.steps_OS))
    n = (found.codes_OI.int() + zero) // step
    assert int(step.min()) >= 1
    assert 0 <= int(n.min()) <= int(n.max()) <= 15
    assert torch.equal(step * n - zero, found.codes_OI.int())
    groups, off = weight.view(-1, 128), (found.floats() - weight).view(-1, 128)
    assert bool((off.norm(dim=1) < 0.2 * groups.norm(dim=1)).all())


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(3, 256)
    weight[0, 128:] = torch.randn(128)
    found = rounded(weight).floats()
    assert torch.equal(found[1:], weight[1:])
    assert torch.equal(found[0, :128], weight[0, :128])
