"""GPTQ: quantize columns in order and compensate each error in the columns not yet quantized.

Frantar et al., "GPTQ", 2022. Given the second moment E[x x^T] of a linear's inputs, the error of one input
can in part be predicted from the inputs after it, so their weights are adjusted before they are quantized in
turn. Codes and scales have the usual formats. Plain torch, float32: this runs once, when a checkpoint is
made.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..quant_formats import Quant
from ..quantize_int import (
    STEP_INPUTS,
    best_int4_scale,
    int8_scale,
    round_to_grid,
    round_with_steps,
    step_and_zero,
)
from ..weight_packing import QuantizedWeight

DAMPING = 0.01
"""Damping added to the diagonal, as a share of its mean: inputs of other texts differ."""


@dataclass(frozen=True, slots=True)
class GptqQuantizer:
    """Input statistics of one linear, prepared for quantizing its weights."""

    importance_I: Tensor
    """Mean square of each input."""
    later_II: Tensor
    """Upper triangular. Row i over its diagonal gives the compensation of an error in input i by the inputs
    after it.
    """

    @classmethod
    def of(cls, moment_II: Tensor) -> "GptqQuantizer":
        """Prepare from `moment_II`, the mean of x x^T, float32 and finite. Damping grows until the
        factorization succeeds.
        """
        diagonal_I = moment_II.diagonal()
        typical = float(diagonal_I.mean()) or 1.0
        damping = DAMPING
        while True:
            damped_II = moment_II + torch.eye(len(moment_II)) * (damping * typical)
            lower_II, failed = torch.linalg.cholesky_ex(damped_II)
            if not failed:
                later_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
            if not failed and bool(later_II.isfinite().all()):
                return cls(diagonal_I / typical + damping, later_II)
            damping *= 10

    def round(self, quant: Quant, weight_OI: Tensor) -> QuantizedWeight:
        weight_OI = weight_OI.float().clone()
        outputs, inputs = weight_OI.shape
        codes_OI = torch.empty(outputs, inputs, dtype=torch.int8)
        scales_OG = torch.empty(outputs, quant.groups(inputs), dtype=torch.float16)
        steps = []
        for g in range(quant.groups(inputs)):
            begin, end = g * quant.group, min((g + 1) * quant.group, inputs)
            group_Og = weight_OI[:, begin:end]
            grid = QuantGrid.of(group_Og, self.importance_I[begin:end], quant)
            later_gI = self.later_II[begin:end]
            errors_Og = round_group(group_Og, grid, later_gI[:, begin:end], codes_OI[:, begin:end])
            weight_OI[:, end:] -= errors_Og @ later_gI[:, end:]
            scales_OG[:, g] = grid.scale_O
            steps.append(grid.steps_OS)
        return QuantizedWeight(
            quant, codes_OI, scales_OG, steps_OS=torch.cat(steps, 1) if quant.step else None
        )


@dataclass(frozen=True, slots=True)
class QuantGrid:
    """Values that the weights of a group can have."""

    bits: int
    scale_O: Tensor
    """float16."""
    steps_OS: Tensor
    """Step bytes as in `QuantizedWeight`; without steps [O, 0]."""

    @classmethod
    def of(cls, group_Og: Tensor, importance_g: Tensor, quant: Quant) -> "QuantGrid":
        if not quant.step:
            none = torch.empty(len(group_Og), 0, dtype=torch.uint8)
            scale_O = int8_scale(group_Og) if quant.bits == 8 else best_int4_scale(group_Og, importance_g)
            return cls(quant.bits, scale_O.half(), none)
        fill = (0, quant.group - group_Og.shape[1])
        x_OGg, importance_Gg = pad(group_Og, fill).unsqueeze(1), pad(importance_g, fill).unsqueeze(0)
        _, scales_OG, steps_OGS = round_with_steps(x_OGg, quant, importance_Gg)
        return cls(quant.bits, scales_OG[:, 0], steps_OGS[:, 0])

    def nearest(self, x_O: Tensor, i: int) -> Tensor:
        """Round x, in units of the scale, to the nearest values of input i."""
        if not self.steps_OS.shape[1]:
            most = 1 << (self.bits - 1)
            return x_O.round().clamp_(-most, most - 1)
        step_O, zero_O = step_and_zero(self.steps_OS[:, i // STEP_INPUTS])
        return round_to_grid(x_O, step_O.float(), zero_O.float())


def round_group(group_Og: Tensor, grid: QuantGrid, later_gg: Tensor, codes_Og: Tensor) -> Tensor:
    """Quantize a group: fill `codes_Og`, adjust the weights in `group_Og`, return each error over its
    diagonal.
    """
    scale_O = grid.scale_O.float()
    inverse_O = torch.where(scale_O == 0, 0, 1 / scale_O)
    errors_gO = torch.empty(group_Og.shape[1], len(group_Og))
    for i, later_g in enumerate(later_gg):
        weight_O = group_Og[:, i]
        code_O = grid.nearest(weight_O * inverse_O, i)
        codes_Og[:, i] = code_O.to(torch.int8)
        errors_gO[i] = (weight_O - code_O * scale_O) / later_g[i]
        group_Og[:, i + 1 :] -= errors_gO[i].unsqueeze(1) * later_g[i + 1 :]
    return errors_gO.T
