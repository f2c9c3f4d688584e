"""Fused MoE: rows are sorted by expert on the device and multiplied in one grouped GEMM, without
synchronizing.

T rows, K experts a row, S = T K rows of all experts, E hidden, F feed-forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...lora import MAX_SLOTS, TILE_ROWS, ExpertAdapters, LoraTiles
from ...op_types import Mixture
from ...reference.moe import route, weigh
from ..elementwise import gate_rows
from . import tile_config as tiles
from .gemm import PLAIN_BLOCK, STEP, Grouped
from .gemm_inner import owner_of_tile, sum_grouped
from .gemm_w8a8 import BLOCK, sum_fp8, sum_int8
from .linear import (
    DenseLinear,
    Fp8BlockLinear,
    Fp8Linear,
    Linear,
    W8A8Linear,
    WeightOnlyIntLinear,
    row_format_of,
)
from .lora import add
from .quantize_activations import Rows8, quantize_rows
from .tile_config import Tile

MANY = 64
"""Average rows of an expert above which tiles are tall and integer weights are dequantized before the
product.
"""
SORT_BLOCK = 2048
"""Rows of one turn of `expert_tiles_kernel`."""
GROUPED, INT8, FP8 = 0, 1, 2
"""Values of KIND: the inner loop that multiplies."""
WITH_INT8 = tl.constexpr(INT8)
WITH_FP8 = tl.constexpr(FP8)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of all experts as the kernel reads them, [X * O, I] in some format."""

    data: Tensor
    scales: Tensor
    offsets: Tensor
    kind: int
    group: int
    constants: dict[str, Any] = field(default_factory=dict)


def experts_product(
    x_TI: Tensor,
    packed: Linear,
    starts_X1: Tensor,
    *,
    eight: Rows8 | None = None,
    fixed: bool = False,
    count: int | None = None,
) -> Tensor:
    """Grouped GEMM: multiply row t of expert e, starts[e] <= t < starts[e + 1], by weight[e].T; starts are
    int32 on the device. Rows from the last start on get no result.

    `packed` holds all experts, concatenated. `eight` is x in the format `row_format_of(packed)`, if it was
    quantized before. `fixed`: one tile for any number of rows, so that a row's bits do not depend on it.
    `count`: experts that share the rows, if more than `packed` holds.
    """
    rows, inputs = x_TI.shape
    experts = len(starts_X1) - 1
    outputs = outputs_of(packed) // experts
    assert x_TI.stride(1) == 1
    out_TO = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not rows:
        return out_TO
    rows_each = 0 if fixed else rows // (count or experts)
    row_format = row_format_of(packed)
    if row_format is None:
        tile = tile_for(x_TI.device, rows_each, x_TI.element_size())
        multiplied, scales, x_row, x_step = x_TI, x_TI, x_TI.stride(0), 0
    else:
        tile = tile_for(x_TI.device, rows_each, 1)
        multiplied, scales = eight or quantize_rows(x_TI, row_format)
        x_row, x_step = inputs, scales.stride(1)
    stack = stack_of(packed, x_TI.element_size(), wide=rows_each > MANY)
    grid = (rows // tile.rows + experts, triton.cdiv(outputs, tile.columns))
    experts_kernel[grid](
        out_TO,
        multiplied,
        scales,
        x_step,
        stack.data,
        stack.scales,
        stack.offsets,
        starts_X1,
        experts,
        outputs,
        inputs,
        x_row,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        KIND=stack.kind,
        GROUP=stack.group,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        **stack.constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_TO


def outputs_of(packed: Linear) -> int:
    """Return the number of outputs of all experts together."""
    match packed:
        case WeightOnlyIntLinear(weight, _) | W8A8Linear(weight, _):
            return weight.outputs
        case DenseLinear() | Fp8Linear() | Fp8BlockLinear():
            return len(packed.weight_OI)


def stack_of(packed: Linear, itemsize: int, *, wide: bool) -> ExpertWeights:
    """Describe the weights to the kernel. `itemsize` is that of x; `wide`: integers are dequantized before
    the product.
    """
    constants = {"UNROLL": 1, "BITS": 0, "GRID": 0, "WIDE": False, "BLOCKWISE": False, "SHARED": 1}
    match packed:
        case DenseLinear(data, _):
            # Float32 has no tensor cores: its tile lives in registers.
            return ExpertWeights(
                data, data, data, GROUPED, PLAIN_BLOCK // (2 if itemsize == 4 else 1), constants
            )
        case WeightOnlyIntLinear(weight, _):
            return integer_stack(weight, constants, wide=wide)
        case W8A8Linear(weight, _):
            return ExpertWeights(weight.weight, weight.scales, weight.weight, INT8, weight.group, constants)
        case Fp8Linear(data, scales, _):
            return ExpertWeights(data, scales, data, FP8, BLOCK, constants)
        case Fp8BlockLinear(data, scales, _):
            constants |= {"BLOCKWISE": True, "SHARED": BLOCK if len(scales) < len(data) else 1}
            return ExpertWeights(data, scales, data, FP8, BLOCK, constants)


def integer_stack(weight: Grouped, constants: dict[str, Any], *, wide: bool) -> ExpertWeights:
    """Describe integer weights to the kernel."""
    constants |= {
        "UNROLL": max(1, STEP // weight.group),
        "BITS": weight.bits,
        "GRID": weight.grid,
        "WIDE": wide,
    }
    return ExpertWeights(weight.weight, weight.scales, weight.offsets, GROUPED, weight.group, constants)


def tile_for(device: torch.device, rows_each: int, itemsize: int) -> Tile:
    """Choose the tile; `itemsize` is that of the multiplied rows."""
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    hopper = tiles.capability(device)[0] == 9
    if rows_each <= 16:
        return Tile(16, 64, 4, 4)
    return Tile(128, 128, 8, 4) if rows_each > MANY and hopper else Tile(64, 64, 4, 4 if hopper else 3)


@triton.jit(do_not_specialize=["x_step"], do_not_specialize_on_alignment=["starts"])
def experts_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    x_step: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    starts: tl.tensor,
    experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_row: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    BITS: tl.constexpr,
    GRID: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Multiply one tile of an expert's rows by its weights: x @ weight[e].T, with float32 sums (int32 in int8
    products).

    Reference: `ExpertLayer` in `kernels/reference/moe.py`.
    """
    tile = tl.program_id(0)
    low = owner_of_tile(starts, experts, tile, ROWS)
    start = tl.load(starts + low)
    end = tl.load(starts + low + 1)
    first = start + (tile - (start // ROWS + low)) * ROWS
    m = first + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_m, real_n = m < end, n < outputs
    row = low * outputs + n  # of all experts' weights
    turns = tl.cdiv(tl.cdiv(inputs, GROUP), UNROLL)
    turns = tl.where(first < end, turns, 0)  # tiles past an expert's last row have nothing to do
    if KIND == WITH_INT8:
        acc = sum_int8(
            x, x_scales, x_step, weight, scales, m, real_m, row, real_n, 0, turns, experts * outputs, inputs,
            ROWS, COLUMNS, GROUP,
        )  # fmt: skip
    elif KIND == WITH_FP8:
        acc = sum_fp8(
            x, x_scales, x_step, weight, scales, m, real_m, row, real_n, 0, turns, inputs,
            ROWS, COLUMNS, GROUP, BLOCKWISE, SHARED,
        )  # fmt: skip
    else:
        acc = sum_grouped(
            x + m.to(tl.int64)[:, None] * x_row, real_m, weight, scales, offsets, row, real_n, 0, turns,
            experts * outputs, inputs,
            ROWS, COLUMNS, GROUP, UNROLL, BITS, GRID, WIDE, PRECISION,
        )  # fmt: skip
    place = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])


def experts(
    mixture: Mixture,
    x_TE: Tensor,
    logits_TX: Tensor,
    shared_TE: Tensor | None = None,
    gate_T1: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
    *,
    fixed: bool = False,
) -> Tensor:
    """Implement `Ops.experts`. `fixed`: a row's bits never depend on its neighbors."""
    chosen_TK, shares_TK = route(logits_TX, mixture.per_token, mixture.normalized, mixture.routing)
    here, count = mixture.here, mixture.count
    if mixture.held is not None:  # neighbors; rows of experts that are not here come last
        chosen_TK = chosen_TK - here[0]
        chosen_TK = chosen_TK.masked_fill((chosen_TK < 0) | (chosen_TK >= len(here)), len(here))
    adapted = None
    if adapters is not None and _has_some(adapters):
        assert isinstance(adapters.rows, LoraTiles)
        sorted_S, order_S, adapted = sort_experts(chosen_TK, len(here), adapters.rows)
    else:
        sorted_S, order_S = chosen_TK.flatten().sort(stable=True)
    limits = torch.arange(len(here) + 1, device=x_TE.device)
    starts_X1 = torch.searchsorted(sorted_S, limits).int()
    gate_up, down = single_linear(mixture.gate_ups), single_linear(mixture.downs)
    rows_SE = x_TE[order_S // mixture.per_token]
    if mixture.routing.scales_inputs:
        rows_SE = (rows_SE.float() * shares_TK.flatten()[order_S].unsqueeze(1)).to(x_TE.dtype)
        shares_TK = torch.ones_like(shares_TK)
    gates_S2F = experts_product(rows_SE, gate_up, starts_X1, fixed=fixed, count=count)
    gates_S2F = with_biases(gates_S2F, gate_up, sorted_S)
    if adapters is not None and adapted is not None:
        add(adapters.gate_ups, rows_SE, gates_S2F, adapted)
    inner_SF, eight = gate_rows(gates_S2F, mixture.activation, row_format_of(down))
    results_SE = experts_product(inner_SF, down, starts_X1, eight=eight, fixed=fixed, count=count)
    results_SE = with_biases(results_SE, down, sorted_S)
    if adapters is not None and adapted is not None:
        add(adapters.downs, inner_SF, results_SE, adapted)
    rows_TKE = x_TE.new_empty(*chosen_TK.shape, x_TE.shape[1])
    if mixture.held is not None:
        results_SE.masked_fill_((sorted_S == len(here)).unsqueeze(1), 0.0)
    rows_TKE.view(-1, x_TE.shape[1])[order_S] = results_SE
    return weigh(rows_TKE, shares_TK, shared_TE, gate_T1)


def _has_some(adapters: ExpertAdapters) -> bool:
    return adapters.gate_ups.on_device is not None or adapters.downs.on_device is not None


def with_biases(rows_SO: Tensor, packed: Linear, experts_S: Tensor) -> Tensor:
    """Add to each row the bias of its expert, where there are biases, [X * O]."""
    if packed.bias_O is None:
        return rows_SO
    biases_XO = packed.bias_O.view(-1, rows_SO.shape[1])
    return rows_SO.add_(biases_XO[experts_S.clamp(max=len(biases_XO) - 1)])


def single_linear(linears: Sequence[Linear]) -> Linear:
    """Return the one linear that holds all experts."""
    (packed,) = linears
    return packed


def sort_experts(chosen_TK: Tensor, experts: int, rows: LoraTiles) -> tuple[Tensor, Tensor, LoraTiles]:
    """Sort rows by expert and those of one expert by adapter. Return the expert of each, its number in
    `chosen_TK`, both [S], and tiles of sorted rows with an adapter, whose slot is that of a pair.
    """
    count, per_row = chosen_TK.numel(), chosen_TK.shape[1]
    kinds = 1 + MAX_SLOTS
    keys_TK = chosen_TK * kinds
    mark_adapters_kernel[(len(rows.tiles),)](
        keys_TK, rows.tiles, PER_ROW=per_row, ROWS=TILE_ROWS, num_warps=1
    )
    sorted_S, order_S = keys_TK.flatten().sort(stable=True)
    starts_S = torch.searchsorted(sorted_S, sorted_S)
    most = most_expert_tiles(rows, count, per_row, experts)
    tiles = torch.full((most, 1 + TILE_ROWS), -1, dtype=torch.int32, device=chosen_TK.device)
    expert_tiles_kernel[(1,)](
        tiles, sorted_S, starts_S, count, experts, KINDS=kinds, ROWS=TILE_ROWS, BLOCK=SORT_BLOCK, num_warps=8
    )
    return sorted_S // kinds, order_S, LoraTiles(tiles)


def most_expert_tiles(rows: LoraTiles, count: int, per_row: int, experts: int) -> int:
    """Return the most tiles that rows of adapters can have, sorted by expert and adapter; without asking the
    device. `count`: rows of all experts.
    """
    slots = len(rows.tiles) if rows.host is None else len(set(rows.host[:: 1 + TILE_ROWS]))
    count = min(count, len(rows.tiles) * TILE_ROWS * per_row)
    return min(count, min(slots, MAX_SLOTS) * experts + count // TILE_ROWS)


@triton.jit(do_not_specialize_on_alignment=["keys", "tiles"])
def mark_adapters_kernel(
    keys: tl.tensor, tiles: tl.tensor, PER_ROW: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """Add 1 + slot to the keys of rows that have an adapter.

    Reference: `add_expert` in `kernels/reference/lora.py`.
    """
    at = tiles + tl.program_id(0) * (ROWS + 1)
    slot = tl.load(at)
    row = tl.load(at + 1 + tl.arange(0, ROWS)).to(tl.int64)
    for k in range(PER_ROW):
        key = keys + row * PER_ROW + k
        tl.store(key, tl.load(key, mask=row >= 0, other=0) + slot + 1, mask=row >= 0)


@triton.jit(do_not_specialize=["count", "experts"], do_not_specialize_on_alignment=["keys", "starts"])
def expert_tiles_kernel(
    tiles: tl.tensor,
    keys: tl.tensor,
    starts: tl.tensor,
    count: tl.tensor,
    experts: tl.tensor,
    KINDS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write tiles of sorted rows: runs of one key, cut after `ROWS` rows. One program, as they are numbered.

    Reference: `add_expert` in `kernels/reference/lora.py`.
    """
    done = 0
    for first in range(0, count, BLOCK):
        row = first + tl.arange(0, BLOCK)
        real = row < count
        key = tl.load(keys + row, mask=real, other=0).to(tl.int32)
        entry = (row - tl.load(starts + row, mask=real, other=0).to(tl.int32)) % ROWS
        slot = key % KINDS - 1
        real = real & (slot >= 0) & (key // KINDS < experts)  # other ranks have the last ones
        begins = (real & (entry == 0)).to(tl.int32)
        at = tiles + (done + tl.cumsum(begins, 0) - 1) * (ROWS + 1)
        tl.store(at + 1 + entry, row, mask=real)
        tl.store(at, slot * experts + key // KINDS, mask=begins > 0)
        done += tl.sum(begins, 0)
