"""Linears in every weight format, and the choice of their kernel by format and number of rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import scaled_mm
from .dequantize_weights import dequantize
from .gemm import Grouped, product
from .gemm_w8a8 import BLOCK, fp8_product, int8_product
from .quantize_activations import RowFormat, Rows8, quantize_rows
from .scaled_mm import Sharing

TILED_ROWS = 512
"""Most rows for which integer weights are multiplied as they are stored. With more rows arithmetic dominates:
one pass that dequantizes the weights and cuBLAS are faster then.
"""


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """Unquantized weights [O, I]."""

    weight_OI: Tensor
    bias_O: Tensor | None


@dataclass(frozen=True, slots=True)
class WeightOnlyIntLinear:
    """Integer weights of 4 or 8 bits for unquantized rows."""

    weight: Grouped
    bias_O: Tensor | None
    order_I: Tensor | None = None
    """Input of a row that belongs to each input of the weights; None: the same."""


@dataclass(frozen=True, slots=True)
class W8A8Linear:
    """int8 weights that are multiplied by int8 rows."""

    weight: Grouped
    bias_O: Tensor | None


FP8_ROWS = RowFormat(torch.float8_e4m3fn, None)
FP8_BLOCKS = RowFormat(torch.float8_e4m3fn, BLOCK)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """E4M3 weights with one scale for each output, for rows with one scale each or a static one."""

    weight_OI: Tensor
    scales: Tensor
    """Scales of the outputs, [O, 1]."""
    bias_O: Tensor | None
    given: Tensor | None = None
    """Static input scale, float32 [1], where the checkpoint has one."""
    one_1: Tensor | None = None
    """Scale of all outputs, where they share one."""
    by_torch: Sharing | None = None
    """Scale layout for `torch._scaled_mm` (`scaled_mm_choice.py`); None: not multiplied by it."""

    @property
    def row_format(self) -> RowFormat:
        return FP8_ROWS if self.given is None else FP8_ROWS._replace(given=self.given)


@dataclass(frozen=True, slots=True)
class Fp8BlockLinear:
    """E4M3 weights with block scales, for rows with one scale for each 128 inputs."""

    weight_OI: Tensor
    scales: Tensor
    """Scales, [O / 128, I / 128] or [O, I / 128]."""
    bias_O: Tensor | None
    by_torch: Sharing | None = None

    @property
    def row_format(self) -> RowFormat:
        return FP8_BLOCKS


Linear = DenseLinear | WeightOnlyIntLinear | W8A8Linear | Fp8Linear | Fp8BlockLinear


def row_format_of(packed: Linear) -> RowFormat | None:
    """Return the 8-bit row format that this linear multiplies; None: unquantized rows."""
    match packed:
        case W8A8Linear(weight, _):
            return RowFormat(torch.int8, weight.group)
        case Fp8Linear() | Fp8BlockLinear():
            return packed.row_format
    return None


def multiply(packed: Linear, x_TI: Tensor, eight: Rows8 | None, *, fixed: bool) -> Tensor:
    """Multiply by a linear. `eight` is x in the linear's row format, where an operation before has written
    it.
    """
    match packed:
        case DenseLinear(weight_OI, bias_O):
            return (
                product(x_TI, weight_OI, bias_O, fixed=True) if fixed else F.linear(x_TI, weight_OI, bias_O)
            )
        case WeightOnlyIntLinear(weight, bias_O, order_I):
            x_TI = x_TI if order_I is None else x_TI.index_select(1, order_I)
            tiled = len(x_TI) <= TILED_ROWS and x_TI.element_size() == 2  # float32 has no tensor cores
            if fixed or tiled:
                return product(x_TI, weight, bias_O, fixed=fixed)
            return F.linear(x_TI, dequantize(weight, x_TI.dtype), bias_O)
        case W8A8Linear(weight, bias_O):
            rows = eight or quantize_rows(x_TI, RowFormat(torch.int8, weight.group))
            return int8_product(rows, weight, bias_O, x_TI.dtype, fixed=fixed)
        case Fp8Linear() | Fp8BlockLinear():
            rows = eight or quantize_rows(x_TI, packed.row_format)
            return multiply_floats(packed, rows, x_TI.dtype, fixed=fixed)


def multiply_floats(
    packed: Fp8Linear | Fp8BlockLinear, rows: Rows8, dtype: torch.dtype, *, fixed: bool
) -> Tensor:
    """Multiply FP8 rows by FP8 weights, in Triton or PyTorch: [T, O] in `dtype`."""
    weight_OI, scales, bias_O = packed.weight_OI, packed.scales, packed.bias_O
    match packed.by_torch:
        case None:
            return fp8_product(rows, weight_OI, scales, bias_O, dtype, fixed=fixed)
        case "blocks":
            out = scaled_mm.by_blocks(rows, weight_OI, scales, dtype)
        case "rows":
            out = scaled_mm.by_rows(rows, weight_OI, scales, dtype)
        case "tensor":
            assert isinstance(packed, Fp8Linear)
            assert packed.given is not None
            assert packed.one_1 is not None
            out = scaled_mm.by_tensor(rows, weight_OI, packed.given, packed.one_1, dtype)
    return out if bias_O is None else out.add_(bias_O)
