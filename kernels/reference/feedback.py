"""Rounding in which the inputs that come later make good what an input lost.

Frantar et al., "GPTQ", 2022: given the mean of x xᵀ over the rows x that a linear meets, the error of one
input can in part be foretold from the inputs after it, so their weights are moved against it before they are
rounded in turn. What comes out are codes and scales like any others. Plain torch, float32: it runs once,
where a checkpoint is made.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..packing import Rounded
from ..quant import Quant

DAMPING = 0.01
"""Of the mean of the diagonal, added to it: rows of other texts differ."""
STEPS = range(-5, 6)
"""Scales that are tried for 4 bits: the largest weight at -8 - 0.2 · step."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What is known of the rows of one linear, ready for its weights."""

    importance_I: Tensor
    """The mean square of each input."""
    later_II: Tensor
    """Upper triangular: row i over its diagonal says how the inputs after i answer for an error in i."""

    @classmethod
    def of(cls, moment_II: Tensor) -> "Feedback":
        """`moment_II`: the mean of x xᵀ, float32 and finite."""
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

    def round(self, quant: Quant, weight_OI: Tensor) -> Rounded:
        weight_OI = weight_OI.float().clone()
        outputs, inputs = weight_OI.shape
        codes_OI = torch.empty(outputs, inputs, dtype=torch.int8)
        scales_OG = torch.empty(outputs, quant.groups(inputs), dtype=torch.float16)
        for g in range(quant.groups(inputs)):
            begin, end = g * quant.group, min((g + 1) * quant.group, inputs)
            group_Og = weight_OI[:, begin:end]
            scales_OG[:, g] = best_scale(group_Og, self.importance_I[begin:end], quant.bits)
            later_gI = self.later_II[begin:end]
            errors_Og = round_group(
                group_Og, scales_OG[:, g].float(), later_gI[:, begin:end], codes_OI[:, begin:end], quant.bits
            )
            weight_OI[:, end:] -= errors_Og @ later_gI[:, end:]
        return Rounded(quant, codes_OI, scales_OG)


def round_group(group_Og: Tensor, scale_O: Tensor, later_gg: Tensor, codes_Og: Tensor, bits: int) -> Tensor:
    """Fills `codes_Og`, moves the weights of `group_Og`; what is told is each error over its diagonal."""
    most = 1 << (bits - 1)
    inverse_O = torch.where(scale_O == 0, 0, 1 / scale_O)
    errors_gO = torch.empty(group_Og.shape[1], len(group_Og))
    for i, later_g in enumerate(later_gg):
        weight_O = group_Og[:, i]
        code_O = (weight_O * inverse_O).round_().clamp_(-most, most - 1)
        codes_Og[:, i] = code_O.to(torch.int8)
        errors_gO[i] = (weight_O - code_O * scale_O) / later_g[i]
        group_Og[:, i + 1 :] -= errors_gO[i].unsqueeze(1) * later_g[i + 1 :]
    return errors_gO.T


def best_scale(group_Og: Tensor, importance_g: Tensor, bits: int) -> Tensor:
    """Float16 [O]. As the kernels choose it, with each error counted by its input's mean square too."""
    extreme_O = group_Og.gather(1, group_Og.abs().argmax(1, keepdim=True)).squeeze(1)
    if bits == 8:
        return (extreme_O.abs() / 127).half()
    typical_O1 = group_Og.square().mean(1, keepdim=True).sqrt()
    counts_Og = (group_Og.abs() + typical_O1) * importance_g
    best_O, best_gain_O = extreme_O / -8, torch.zeros_like(extreme_O)
    for step in STEPS:
        inverse_O = torch.where(extreme_O == 0, 0, -(8 + 0.2 * step) / extreme_O)
        code_Og = (group_Og * inverse_O.unsqueeze(1)).round_().clamp_(-8, 7)
        cross_O = (counts_Og * group_Og * code_Og).sum(1)
        square_O = (counts_Og * code_Og * code_Og).sum(1)
        gain_O = torch.where(square_O > 0, cross_O * cross_O / square_O, 0)
        better_O = gain_O > best_gain_O
        best_O = torch.where(better_O, cross_O / square_O, best_O)
        best_gain_O = torch.where(better_O, gain_O, best_gain_O)
    return best_O.half()
