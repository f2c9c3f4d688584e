"""Weights in the layouts that the linears read, rounded as they are packed. Plain torch: it runs once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quant import Quant
from .gemm import Grouped
from .kv_cache import LARGEST

ROWS_AT_ONCE = 1024
"""Outputs rounded at once: bounds what packing takes beside the weights."""


def pack_grouped(weight_OI: Tensor, quant: Quant) -> Grouped:
    outputs, inputs = weight_OI.shape
    groups, width = -(-inputs // quant.group), quant.group * quant.bits // 8
    device = weight_OI.device
    weight = torch.empty(
        groups, outputs, width, device=device, dtype=(torch.int8 if quant.bits == 8 else torch.uint8)
    )
    scales = torch.empty(groups, outputs, device=device, dtype=torch.float16)
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = F.pad(weight_OI[rows].float(), (0, groups * quant.group - inputs))
        x_OGg = part.view(-1, groups, quant.group)
        scale_OG = (int8_scale(x_OGg) if quant.bits == 8 else best_int4_scale(x_OGg)).half()
        scales[:, rows] = scale_OG.T
        weight[:, rows] = pair(round_to(x_OGg, scale_OG.float(), quant.bits), quant.bits).transpose(0, 1)
    return Grouped(weight, scales, quant.bits, inputs)


def round_to(x_OGg: Tensor, scale_OG: Tensor, bits: int) -> Tensor:
    inverse = torch.where(scale_OG == 0, 0, 1 / scale_OG).unsqueeze(-1)
    most = 1 << (bits - 1)
    return (x_OGg * inverse).round_().clamp_(-most, most - 1).to(torch.int8)


def pair(codes_OGg: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes_OGg
    low, high = (codes_OGg + 8).to(torch.uint8).chunk(2, -1)
    return low | high << 4


def int8_scale(x_OGg: Tensor) -> Tensor:
    return x_OGg.abs().amax(-1) / 127


def best_int4_scale(x_OGg: Tensor) -> Tensor:
    """Rounding to nearest with the largest weight at the end of the range is the start. Eleven scales around
    it are tried, each with its least-squares correction; the smallest error weighted by x^2 wins.
    """
    extreme = x_OGg.gather(-1, x_OGg.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best = extreme / -8
    best_gain = torch.zeros_like(best)
    importance = x_OGg.square()
    for step in range(-5, 6):
        inverse = torch.where(extreme == 0, 0, -(8 + 0.2 * step) / extreme).unsqueeze(-1)
        code = (x_OGg * inverse).round_().clamp_(-8, 7)
        cross = (importance * x_OGg * code).sum(-1)
        square = (importance * code * code).sum(-1)
        gain = torch.where(square > 0, cross * cross / square, 0)
        better = gain > best_gain
        best = torch.where(better, cross / square, best)
        best_gain = torch.where(better, gain, best_gain)
    return best


def pack_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 numbers [O, I] and their scales [O, 1]."""
    numbers = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scales = torch.empty((len(weight_OI), 1), dtype=torch.float32, device=weight_OI.device)
    for first in range(0, len(weight_OI), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = weight_OI[rows].float()
        scale = part.abs().amax(1, keepdim=True) / LARGEST[torch.float8_e4m3fn]
        numbers[rows] = (part * torch.where(scale == 0, 0, 1 / scale)).to(torch.float8_e4m3fn)
        scales[rows] = scale
    return numbers, scales
