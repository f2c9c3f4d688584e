"""Linears in every weight format, the choice of their kernel by format and number of rows, the 8-bit rows
that norms, gates and attention write for the next linear, and the lookup of embeddings.

`Ops.before` says which linear that is, and with it the format.
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .gemm import Grouped, product
from .gemm_inner import codes_of, load_words
from .gemm_w8a8 import BLOCK, Sharing, fp8_product, int8_product, scaled_mm
from .quantize_activations import RowFormat, Rows8, quantize_rows
from .tile_config import power_of_two

DEQUANTIZED_OUTPUTS = 32
"""Outputs of one program of `dequantize`."""


def dequantize(packed: Grouped, dtype: torch.dtype) -> Tensor:
    """Dequantize to [O, I] in `dtype`."""
    out_OI = torch.empty((packed.outputs, packed.inputs), dtype=dtype, device=packed.weight.device)
    grid = (triton.cdiv(packed.outputs, DEQUANTIZED_OUTPUTS), packed.weight.shape[0])
    dequantize_kernel[grid](
        out_OI,
        packed.weight,
        packed.scales,
        packed.offsets,
        packed.outputs,
        packed.inputs,
        GROUP=packed.group,
        BITS=packed.bits,
        GRID=packed.grid,
        BLOCK=DEQUANTIZED_OUTPUTS,
    )
    return out_OI


@triton.jit
def dequantize_kernel(
    out: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write scale * code for one group of BLOCK outputs, computed in float32.

    Reference: `QuantizedWeight.floats` in `kernels/weight_packing.py`.
    """
    WIDTH: tl.constexpr = GROUP * BITS // 8
    g = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = n < outputs
    j = tl.arange(0, WIDTH)
    cell = g * outputs + n
    scale = tl.load(scales + cell, mask=real, other=0.0).to(tl.float32)[:, None]
    i = g * GROUP + j
    place = n.to(tl.int64)[:, None] * inputs + i[None, :]
    if BITS == 8:
        stored = tl.load(weight + cell[:, None] * WIDTH + j[None, :], mask=real[:, None], other=0)
        low = stored.to(tl.float32)
    else:
        words = load_words(weight, cell, real, WIDTH)
        low = codes_of(words, 0, offsets, cell, real, GROUP, GRID, tl.float32)
    wide = low * scale
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=real[:, None] & (i < inputs)[None, :])
    if BITS == 4:
        high = codes_of(words, 4, offsets, cell, real, GROUP, GRID, tl.float32)
        wide = high * scale
        inside = real[:, None] & (i + WIDTH < inputs)[None, :]
        tl.store(out + place + WIDTH, wide.to(out.dtype.element_ty), mask=inside)


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
        case "blocks" | "rows":
            out = scaled_mm(rows, rows.scales, weight_OI, scales, dtype, packed.by_torch)
        case "tensor":
            assert isinstance(packed, Fp8Linear)
            assert packed.given is not None
            assert packed.one_1 is not None
            out = scaled_mm(rows, packed.given, weight_OI, packed.one_1, dtype, "tensor")
    return out if bias_O is None else out.add_(bias_O)


class FusedActivationQuant:
    """Quantized rows of the last result that an operation wrote with some."""

    def __init__(self) -> None:
        self._result: Callable[[], Tensor | None] = lambda: None
        self._rows: Rows8 | None = None
        self._format: RowFormat | None = None

    def keep(self, result: Tensor, rows: Rows8 | None, row_format: RowFormat | None) -> Tensor:
        """Keep the quantized rows of `result` until the next one; return `result`."""
        self._result, self._rows, self._format = ref(result), rows, row_format
        return result

    def rows_for(self, packed: Linear, x: Tensor) -> Rows8 | None:
        """Return the quantized rows of `x` if they were written in the format of `packed`."""
        if self._rows is None or self._format is None or self._result() is not x:
            return None
        return self._rows if self._format.matches(row_format_of(packed)) else None


EMBED_BLOCK = 1024


def embed(packed: Linear, ids_T: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Look up rows of a table in any format, times `scale`: [T, E] in `dtype`."""
    match packed:
        case DenseLinear(weight_VE, _):
            return look_up(weight_VE, weight_VE, ids_T, weight_VE.shape[1], 0, dtype, scale)
        case WeightOnlyIntLinear(weight, _):
            assert weight.bits == 8
            return look_up(weight.weight, weight.scales, ids_T, weight.inputs, weight.group, dtype, scale)
        case Fp8Linear(weight_VE, scales_V1, _):
            return look_up(weight_VE, scales_V1, ids_T, weight_VE.shape[1], -1, dtype, scale)
        case _:
            raise AssertionError(f"no table is kept as {type(packed).__name__}")


def look_up(
    weight: Tensor,
    scales: Tensor,
    ids_T: Tensor,
    width: int,
    group: int,
    dtype: torch.dtype,
    scale: float,
) -> Tensor:
    """Launch the lookup. `group` is 0 without scales, -1 for one scale a row, else weights and scales are as
    in `Grouped`.
    """
    out_TE = torch.empty((len(ids_T), width), dtype=dtype, device=weight.device)
    if len(ids_T):
        block = min(EMBED_BLOCK, power_of_two(width))
        gather_kernel[(len(ids_T), triton.cdiv(width, block))](
            out_TE,
            weight,
            scales,
            ids_T,
            weight.shape[-2],
            scale,
            WIDTH=width,
            GROUP=group,
            BLOCK=block,
            SCALED=scale != 1.0,
        )
    return out_TE


@triton.jit(do_not_specialize_on_alignment=["ids"])
def gather_kernel(
    out: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Write scale * code * row scale for one tile of a row, computed in float32.

    Reference: `embedding` in `kernels/reference/elementwise.py`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = tl.load(ids + row).to(tl.int64)
    if GROUP > 0:
        cell = (column // GROUP).to(tl.int64) * vocabulary + source
        values = tl.load(weight + cell * GROUP + column % GROUP, mask=inside, other=0).to(tl.float32)
        values *= tl.load(scales + cell, mask=inside, other=0.0).to(tl.float32)
    else:
        values = tl.load(weight + source * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if GROUP < 0:
            values *= tl.load(scales + source)
    if SCALED:
        values *= scale
    tl.store(out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=inside)
