"""Scales of integer weights without steps, in plain torch. In C++: `cpu/native/quant_round.h`."""

import torch
from torch import Tensor

from .quant_formats import Quant

TRIED = range(-5, 6)
"""The largest weight at -8 - 0.2 · each."""


def int8_scale(x: Tensor) -> Tensor:
    """[..., group] -> [...]: the largest weight at 127."""
    return x.abs().amax(-1) / 127


def best_int4_scale(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """[..., group] -> [...]. The largest weight at the end of the range is the start.

    Eleven scales around it are tried, each with its least-squares correction. The smallest error
    wins, weighted by |x| + the group's root mean square, and by the importance of its input where known.
    """
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best, best_gain = extreme / -8, torch.zeros_like(extreme)
    counts = x.abs() + x.square().mean(-1, keepdim=True).sqrt()
    if importance is not None:
        counts = counts * importance
    for step in TRIED:
        inverse = torch.where(extreme == 0, 0, -(8 + 0.2 * step) / extreme).unsqueeze(-1)
        code = (x * inverse).round_().clamp_(-8, 7)
        cross, square = (counts * x * code).sum(-1), (counts * code * code).sum(-1)
        gain = torch.where(square > 0, cross * cross / square, 0)
        better = gain > best_gain
        best = torch.where(better, cross / square, best)
        best_gain = torch.where(better, gain, best_gain)
    return best


STEP_INPUTS = 16
PLAIN = 0x81
"""Step 1, zero 8: what formats without steps have."""
SHARES = (0.84, 0.94, 1.04)
"""Of the scale at which the coarsest step is 12, those that are tried."""
NEAR = [(times, zeros) for times in (-1, 0, 1) for zeros in (-2, -1, 0, 1, 2)]
"""Around the step and the zero that just span 16 weights."""


def step_and_zero(steps: Tensor) -> tuple[Tensor, Tensor]:
    """int32, shaped as the bytes are."""
    wide = steps.int()
    step = wide & 15
    return step, step * ((wide >> 4) + 8) >> 1


def to_numbers(halves_OI: Tensor, steps_OS: Tensor, quant: Quant) -> Tensor:
    """int8 of n [O, I]. Rubbish in, rubbish out: numbers that do not fit wrap around."""
    step, zero = of_inputs(steps_OS, quant, halves_OI.shape[1])
    return (step * halves_OI.int() - zero).to(torch.int8)


def to_halves(numbers_OI: Tensor, steps_OS: Tensor, quant: Quant) -> Tensor:
    """The n that `to_numbers` made these of, uint8."""
    step, zero = of_inputs(steps_OS, quant, numbers_OI.shape[1])
    return ((numbers_OI.int() + zero) // step.clamp(min=1)).to(torch.uint8) & 15


def of_inputs(steps_OS: Tensor, quant: Quant, inputs: int) -> tuple[Tensor, Tensor]:
    """Step and zero of each weight, [O, I] int32."""
    step, zero = step_and_zero(steps_OS.repeat_interleave(quant.step, 1)[:, :inputs])
    return step, zero


def round_with_steps(
    x_OGg: Tensor, quant: Quant, importance_Gg: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers [O, G, g] int8, scales [O, G] float16, steps [O, G, S] uint8, of float32.

    An error counts |x| + the root mean square of its 16, times the importance of its input.
    """
    x_OGSk = x_OGg.view(*x_OGg.shape[:2], -1, quant.step)
    low, high = x_OGSk.aminmax(dim=-1)
    middle_OGS = (low + high) / 2
    counts = x_OGSk.abs() + x_OGSk.square().mean(-1, keepdim=True).sqrt()
    if importance_Gg is not None:
        counts = counts * importance_Gg.view(x_OGSk.shape[1:])
    need_OGS = torch.stack(((high - low) / 15, high / 11, low / -11.5)).amax(0)
    widest = torch.maximum(high, -low).amax(-1) * (12 / 127)
    coarsest_OG = torch.maximum(need_OGS.amax(-1), widest)
    best = Best(x_OGSk)
    for share in SHARES:
        scale_OG = coarsest_OG * (share / 12)
        inverse = torch.where(scale_OG == 0, 0, 1 / scale_OG)[:, :, None]
        tried = x_OGSk * inverse[..., None]
        steps, numbers = best_steps(tried, counts, need_OGS * inverse, middle_OGS * inverse)
        best.offer(steps, numbers, (counts * numbers * tried).sum((-1, -2)), counts, scale_OG)
    return best.numbers.flatten(-2).to(torch.int8), best.scale_OG.half(), best.steps_OGS


class Best:
    """Of several scales, each corrected by least squares: the one that explains most weighted squares."""

    def __init__(self, x_OGSk: Tensor) -> None:
        self.numbers = torch.zeros_like(x_OGSk)
        self.steps_OGS = torch.full(x_OGSk.shape[:3], PLAIN, dtype=torch.uint8, device=x_OGSk.device)
        self.scale_OG = torch.zeros(x_OGSk.shape[:2], device=x_OGSk.device)
        self._explained_OG = torch.zeros_like(self.scale_OG)

    def offer(
        self, steps: Tensor, numbers: Tensor, cross_OG: Tensor, counts: Tensor, scale_OG: Tensor
    ) -> None:
        square_OG = (counts * numbers * numbers).sum((-1, -2))
        fitted_OG = torch.where(square_OG > 0, scale_OG * cross_OG / square_OG, 0)
        explained_OG = fitted_OG * scale_OG * cross_OG
        better = explained_OG > self._explained_OG
        self._explained_OG = torch.where(better, explained_OG, self._explained_OG)
        self.scale_OG = torch.where(better, fitted_OG, self.scale_OG)
        self.steps_OGS = torch.where(better[..., None], steps, self.steps_OGS)
        self.numbers = torch.where(better[..., None, None], numbers, self.numbers)


def best_steps(x_OGSk: Tensor, counts: Tensor, need_OGS: Tensor, middle_OGS: Tensor) -> tuple[Tensor, Tensor]:
    """Steps [O, G, S] uint8 and numbers of the smallest weighted error. x in units of the scale."""
    smallest = torch.full_like(need_OGS, torch.inf)
    steps, best = torch.full_like(need_OGS, PLAIN, dtype=torch.uint8), torch.zeros_like(x_OGSk)
    for times, zeros in NEAR:
        step = (need_OGS.round() + times).clamp(1, 15)
        z = ((7 - 2 * middle_OGS / step).round() + zeros).clamp(0, 15)
        zero = (step * (z + 8) / 2).floor()
        numbers = on_grid(x_OGSk, step[..., None], zero[..., None])
        error = (counts * (numbers - x_OGSk).square()).sum(-1)
        better = error < smallest
        smallest = torch.where(better, error, smallest)
        steps = torch.where(better, step.to(torch.uint8) | z.to(torch.uint8) << 4, steps)
        best = torch.where(better[..., None], numbers, best)
    return steps, best


def on_grid(x: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """The nearest step * n - zero, n of 0..15, that fits int8."""
    lowest = ((zero - 128) / step).ceil().clamp(min=0)
    highest = ((zero + 127) / step).floor().clamp(max=15)
    n = torch.minimum(torch.maximum(((x + zero) / step).round(), lowest), highest)
    return step * n - zero
