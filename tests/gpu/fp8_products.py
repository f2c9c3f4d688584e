"""Linears of 8-bit floats by our kernel and by PyTorch's, and the formats that checkpoints alone have."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpu.checks import LIMIT, Check, Checks, Setting, distance, name_of
from gpu.timing import Call
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.linear import scaled_mm_choice as choice
from llmbox.kernels.triton.linear.linear import Fp8BlockLinear, Fp8Linear, multiply_floats
from llmbox.kernels.triton.linear.quantize_activations import Rows8, quantize_rows
from llmbox.kernels.triton.linear.tile_config import has_fp8
from llmbox.kernels.weight_packing import QuantizedWeight
from support.fake_quantized import fake_quantized_ops

FP8 = torch.float8_e4m3fn
NEAR = 0.02
"""||torch - ours|| / ||ours||: sums of other order and precision, rounded to bfloat16."""
GIVEN = 0.02
"""A scale of activations for rows of size 1."""


def of_checkpoint(quant: Quant, weight_OI: Tensor, parts: int = 1) -> QuantizedWeight:
    """As a checkpoint holds `parts` tensors stacked, each with a scale of its own."""
    pieces = weight_OI.float().chunk(parts)
    scales = [(piece.abs().amax() / 448).reshape(1, 1) for piece in pieces]
    codes = [(piece / scale).clamp(-448, 448).to(FP8) for piece, scale in zip(pieces, scales, strict=True)]
    spread = [scale.expand(len(piece), 1) for piece, scale in zip(pieces, scales, strict=True)]
    stacked = torch.cat([each.view(torch.uint8) for each in codes]).view(FP8)
    given = torch.full((1,), GIVEN, device=weight_OI.device) if quant.kind == "given" else None
    return QuantizedWeight(quant, stacked, torch.cat(spread), given)


def pack(ops: Ops, quant: Quant | None, weight_OI: Tensor) -> object:
    """What a linear of this format is, rounded here or read from a checkpoint."""
    if quant is None or not quant.in_checkpoints_only:
        return ops.pack_linear(weight_OI, None)
    assert ops.stored is not None
    return ops.stored.pack_quantized(of_checkpoint(quant, weight_OI), weight_OI.dtype)


def by_torch(
    packed: Fp8Linear | Fp8BlockLinear, dtype: torch.dtype
) -> tuple[Fp8Linear | Fp8BlockLinear | None, str]:
    """The same linear through `torch._scaled_mm`; or None, and why not."""
    sharing = choice.sharing_of(packed)
    if sharing is None:
        return None, "its scales or sizes fit nowhere"
    other = replace(packed, by_torch=sharing)
    reason = choice.why_not(other, dtype)
    return (None, reason) if reason is not None else (other, "")


def both_ways(
    x_TI: Tensor, packed: Sequence[Fp8Linear | Fp8BlockLinear]
) -> tuple[dict[str, Sequence[Call]], str]:
    """Products of rows that are rounded already, one for each weight, and why torch's are not among them."""
    rows = quantize_rows(x_TI, packed[0].row_format)

    def calls(linears: Sequence[Fp8Linear | Fp8BlockLinear]) -> list[Call]:
        return [partial(product, one, rows, x_TI.dtype) for one in linears]

    variants: dict[str, Sequence[Call]] = {
        "product alone, Triton": calls([replace(one, by_torch=None) for one in packed])
    }
    other, reason = by_torch(packed[0], x_TI.dtype)
    if other is not None:
        variants["product alone, torch"] = calls([replace(one, by_torch=other.by_torch) for one in packed])
    return variants, reason


def product(packed: Fp8Linear | Fp8BlockLinear, rows: Rows8, dtype: torch.dtype) -> Tensor:
    return multiply_floats(packed, rows, dtype, fixed=False)


def checks(setting: Setting, dtype: torch.dtype) -> Checks:
    if not has_fp8(setting.device):
        return
    outputs, inputs = (128, 512) if setting.tiny else (1536, 2048)
    weight = setting.randn(outputs, inputs, dtype=dtype) / inputs**0.5
    bias = setting.randn(outputs, dtype=dtype)
    for name in ("fp8-dynamic", "fp8-static"):
        quant = QUANTS[name]
        ops, plain = triton_ops(setting.device, dtype, quant), fake_quantized_ops(quant)
        assert ops.stored is not None
        assert plain.stored is not None
        for parts in (1, 3):
            rounded = of_checkpoint(quant, weight, parts)
            packed = ops.stored.pack_quantized(rounded, dtype, bias)
            exact = plain.stored.pack_quantized(rounded, torch.float32, bias)
            for count in (3,) if setting.tiny else (1, 17, 500):
                x = setting.randn(count, inputs, dtype=dtype)
                error = distance(ops.linear(packed, x), plain.linear(exact, x))
                yield Check(name_of("linear", dtype, name, parts, "scales", count), error, LIMIT[dtype])
    yield from ways(setting, dtype, weight)


def ways(setting: Setting, dtype: torch.dtype, weight: Tensor) -> Checks:
    """Where PyTorch multiplies too, it agrees with ours; that it does not is no failure."""
    for name in ("fp8", "fp8-block", "fp8-static"):
        ops = triton_ops(setting.device, dtype, QUANTS[name])
        packed = pack(ops, QUANTS[name], weight)
        assert isinstance(packed, Fp8Linear | Fp8BlockLinear)
        other, _reason = by_torch(packed, dtype)
        if other is None:
            continue
        for count in (3,) if setting.tiny else (1, 3, 64, 130, 2000):
            rows = quantize_rows(setting.randn(count, weight.shape[1], dtype=dtype), packed.row_format)
            ours = product(replace(packed, by_torch=None), rows, dtype)
            error = distance(product(other, rows, dtype), ours)
            yield Check(name_of("torch's product against ours", dtype, name, count), error, NEAR)
