"""Packing of weights into the layouts of the linears, with quantization. Plain torch: it runs once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quant_formats import Quant
from ...weight_packing import QuantizedWeight, best_int4_scale, int8_scale, round_with_steps, to_nibbles
from ..attention.kv_cache import LARGEST
from .gemm import Grouped
from .gemm_w8a8 import BLOCK

ROWS_AT_ONCE = 1024
"""Outputs quantized at once: bounds the memory that packing takes beside the weights."""


def pack_grouped(weight_OI: Tensor, quant: Quant) -> Grouped:
    outputs, inputs = weight_OI.shape
    groups, width = quant.groups(inputs), quant.group * quant.bits // 8
    empty = weight_OI.new_empty
    weight = empty((groups, outputs, width), dtype=torch.int8 if quant.bits == 8 else torch.uint8)
    scales = empty((groups, outputs), dtype=torch.float16)
    steps_GOS = empty((groups, outputs, quant.group // quant.step), dtype=torch.uint8) if quant.step else None
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = F.pad(weight_OI[rows].float(), (0, groups * quant.group - inputs))
        x_OGg = part.view(-1, groups, quant.group)
        if steps_GOS is None:
            scale_OG = (int8_scale(x_OGg) if quant.bits == 8 else best_int4_scale(x_OGg)).half()
            stored = pair(round_to(x_OGg, scale_OG.float(), quant.bits), quant.bits)
        else:
            numbers_OGg, scale_OG, steps_OGS = round_with_steps(x_OGg, quant)
            halves = to_nibbles(numbers_OGg.flatten(1), steps_OGS.flatten(1), quant)
            stored = pack_nibbles(halves.view(x_OGg.shape))
            steps_GOS[:, rows] = steps_OGS.transpose(0, 1)
        scales[:, rows] = scale_OG.T
        weight[:, rows] = stored.transpose(0, 1)
    return Grouped(weight, scales, quant.bits, inputs, steps_GOS)


def round_to(x_OGg: Tensor, scale_OG: Tensor, bits: int) -> Tensor:
    inverse = torch.where(scale_OG == 0, 0, 1 / scale_OG).unsqueeze(-1)
    most = 1 << (bits - 1)
    return (x_OGg * inverse).round_().clamp_(-most, most - 1).to(torch.int8)


def pair(codes_OGg: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes_OGg
    return pack_nibbles((codes_OGg + 8).to(torch.uint8))


def pack_nibbles(halves_OGg: Tensor) -> Tensor:
    """Pack inputs i and i + group / 2 in one byte, the inputs of four bytes in the order 0, 2, 1, 3.

    A mask then leaves two neighbors in the halves of a 32-bit word, as tensor cores take them.
    """
    low, high = halves_OGg.chunk(2, -1)
    bytes_OGw = low | high << 4
    return bytes_OGw.view(*bytes_OGw.shape[:-1], -1, 2, 2).transpose(-1, -2).reshape(bytes_OGw.shape)


def group_codes(rounded: QuantizedWeight) -> Grouped:
    """Pack the integers that a checkpoint holds."""
    quant = rounded.quant
    codes_OI = rounded.codes_OI if quant.bits == 8 else rounded.nibbles()
    outputs, inputs = codes_OI.shape
    groups = quant.groups(inputs)
    fill = 8 if quant.bits == 4 and not (quant.step or quant.has_zeros or quant.is_e2m1) else 0
    codes_OGg = F.pad(codes_OI, (0, groups * quant.group - inputs), value=fill).view(outputs, groups, -1)
    weight_OGw = codes_OGg if quant.bits == 8 else pack_nibbles(codes_OGg)
    steps_GOS = None
    if rounded.steps_OS is not None:
        steps_GOS = rounded.steps_OS.view(outputs, groups, -1).transpose(0, 1).contiguous()
    scales_GO = rounded.scales_OG.T.contiguous()
    zeros_GO = None if rounded.zeros_OG is None else rounded.zeros_OG.T.contiguous()
    weight = weight_OGw.transpose(0, 1).contiguous()
    return Grouped(weight, scales_GO, quant.bits, inputs, steps_GOS, zeros_GO, quant.is_e2m1)


def pack_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3 numbers [O, I] with scales [O, 1]."""
    numbers = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scales = torch.empty((len(weight_OI), 1), dtype=torch.float32, device=weight_OI.device)
    for first in range(0, len(weight_OI), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = weight_OI[rows].float()
        most = part.abs().amax(1, keepdim=True)
        numbers[rows] = (part * inverse_of(most)).to(torch.float8_e4m3fn)
        scales[rows] = most / LARGEST[torch.float8_e4m3fn]
    return numbers, scales


def pack_fp8_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3 numbers [O, I] with block scales [O / BLOCK, I / BLOCK]."""
    outputs, inputs = weight_OI.shape
    down, across = -(-outputs // BLOCK), -(-inputs // BLOCK)
    numbers = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scales = torch.empty((down, across), dtype=torch.float32, device=weight_OI.device)
    for n in range(down):
        rows = slice(n * BLOCK, (n + 1) * BLOCK)
        part = weight_OI[rows].float()
        most_I = F.pad(part.abs().amax(0), (0, across * BLOCK - inputs))
        most = most_I.view(across, BLOCK).amax(1)
        inverse_I = inverse_of(most).repeat_interleave(BLOCK)[:inputs]
        numbers[rows] = (part * inverse_I).to(torch.float8_e4m3fn)
        scales[n] = most / LARGEST[torch.float8_e4m3fn]
    return numbers, scales


def inverse_of(most: Tensor) -> Tensor:
    """Return the inverse of the E4M3 scale for this largest magnitude."""
    inverse = torch.full_like(most, LARGEST[torch.float8_e4m3fn]) / most
    return torch.where(inverse.isfinite(), inverse, 0)  # infinite for zeros and tiny maxima


def scales_of_blocks(scales_OG: Tensor) -> Tensor:
    """Return scales [O / BLOCK, G] where BLOCK outputs share one; unchanged where merged matrices do not
    share them.
    """
    first = scales_OG[::BLOCK]
    spread = first.repeat_interleave(BLOCK, 0)[: len(scales_OG)]
    return first.contiguous() if torch.equal(spread, scales_OG) else scales_OG.contiguous()
