"""Linears in every weight format: which kernel multiplies, by the format and the number of rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quant import Quant
from .dequantise import dequantise
from .gemm import Grouped, product
from .gemm_fp8 import BLOCK, fp8_product
from .gemm_int8 import int8_product
from .quantise import RowFormat, Rows8, quantise_rows

TILED_ROWS = 512
"""Up to here integer weights are multiplied as they are read. More rows than that pay for one pass that makes
the weights wide, and cuBLAS is faster at the arithmetic, which then decides."""


@dataclass(frozen=True, slots=True)
class Plain:
    weight_OI: Tensor
    bias_O: Tensor | None


@dataclass(frozen=True, slots=True)
class Integers:
    weight: Grouped
    bias_O: Tensor | None


@dataclass(frozen=True, slots=True)
class Floats8:
    weight_OI: Tensor
    scales_O1: Tensor
    bias_O: Tensor | None


@dataclass(frozen=True, slots=True)
class Integers8:
    """Multiplied with int8 rows."""

    weight: Grouped
    bias_O: Tensor | None


@dataclass(frozen=True, slots=True)
class Blocks8:
    weight_OI: Tensor
    scales: Tensor
    """[O / 128, I / 128], or [O, I / 128]."""
    bias_O: Tensor | None


Linear = Plain | Integers | Integers8 | Floats8 | Blocks8


FP8_ROWS = RowFormat(torch.float8_e4m3fn, None)
FP8_BLOCKS = RowFormat(torch.float8_e4m3fn, BLOCK)


def rows_for(quant: Quant | None) -> RowFormat | None:
    """What linears of this format multiply, where that is rows of 8 bits."""
    match quant:
        case Quant(kind="rows", group=group):
            return RowFormat(torch.int8, group)
        case Quant(kind="float"):
            return FP8_ROWS
        case Quant(kind="blocks"):
            return FP8_BLOCKS
    return None


def multiply(packed: Linear, x_TI: Tensor, eight: Rows8 | None, *, fixed: bool) -> Tensor:
    """`eight`: x in the format of `rows_for`, where an operation before has left it so."""
    match packed:
        case Plain(weight_OI, bias_O):
            return (
                product(x_TI, weight_OI, bias_O, fixed=True) if fixed else F.linear(x_TI, weight_OI, bias_O)
            )
        case Integers(weight, bias_O):
            tiled = len(x_TI) <= TILED_ROWS and x_TI.element_size() == 2  # float32 has no tensor cores
            if fixed or tiled:
                return product(x_TI, weight, bias_O, fixed=fixed)
            return F.linear(x_TI, dequantise(weight, x_TI.dtype), bias_O)
        case Integers8(weight, bias_O):
            rows = eight or quantise_rows(x_TI, RowFormat(torch.int8, weight.group))
            return int8_product(rows, weight, bias_O, x_TI.dtype, fixed=fixed)
        case Blocks8(weight_OI, scales, bias_O):
            rows = eight or quantise_rows(x_TI, FP8_BLOCKS)
            return fp8_product(rows, weight_OI, scales, bias_O, x_TI.dtype, fixed=fixed)
        case Floats8(weight_OI, scales_O1, bias_O):
            rows = eight or quantise_rows(x_TI, FP8_ROWS)
            if fixed or not cutlass_can(x_TI, weight_OI):
                return fp8_product(rows, weight_OI, scales_O1, bias_O, x_TI.dtype, fixed=fixed)
            out = scaled_mm(rows, weight_OI, scales_O1, x_TI.dtype)
            return out if bias_O is None else out.add_(bias_O)


def cutlass_can(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """What `torch._scaled_mm` asks for with a scale for each row and output."""
    outputs, inputs = weight_OI.shape
    return (
        x_TI.device.type == "cuda" and x_TI.dtype == torch.bfloat16 and outputs % 16 == 0 and inputs % 16 == 0
    )


def scaled_mm(rows: Rows8, weight_OI: Tensor, scales_O1: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(  # noqa: SLF001 - torch's only door to cuBLAS and CUTLASS in 8 bits
        rows.numbers,
        weight_OI.t(),
        scale_a=rows.scales,
        scale_b=scales_O1.t(),
        out_dtype=dtype,
        use_fast_accum=True,
    )
