"""The linears of all experts of a mixture in one launch: rows sorted by expert, each with its weights.

The grid follows from shapes alone: experts are found by bisection over their first rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .tiles import Tile


def experts_product(x_TI: Tensor, weight_XOI: Tensor, starts_X1: Tensor, *, fixed: bool = False) -> Tensor:
    """Row t of expert e, starts[e] <= t < starts[e + 1], times weight[e].T; int32 starts on the device.

    `fixed`: one tile for any number of rows, so that a row's bits do not depend on it.
    """
    rows, inputs = x_TI.shape
    experts, outputs, _ = weight_XOI.shape
    assert x_TI.stride(1) == 1
    assert weight_XOI.is_contiguous()
    out_TO = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not rows:
        return out_TO
    tile = tile_for(x_TI.device, 0 if fixed else rows // experts, x_TI.element_size())
    grid = (rows // tile.rows + experts, triton.cdiv(outputs, tile.columns))
    experts_kernel[grid](
        out_TO,
        x_TI,
        weight_XOI,
        starts_X1,
        experts,
        outputs,
        inputs,
        x_TI.stride(0),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK=32 if x_TI.element_size() == 4 else 64,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_TO


def tile_for(device: torch.device, rows_each: int, itemsize: int) -> Tile:
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    if rows_each <= 16:
        return Tile(16, 64, 4, 4)
    return Tile(128, 128, 8, 4) if rows_each > 64 and tiles.capability(device)[0] == 9 else Tile(64, 64, 4, 4)


@triton.jit(do_not_specialize_on_alignment=["starts"])
def experts_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    starts: tl.tensor,
    experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_row: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    low = 0
    high = experts
    while high - low > 1:  # the last expert whose tiles start at or before ours
        middle = (low + high) // 2
        if tl.load(starts + middle) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(starts + low)
    end = tl.load(starts + low + 1)
    first = start + (tile - (start // ROWS + low)) * ROWS
    m = first + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_m, real_n = m < end, n < outputs
    base = weight + tl.cast(low, tl.int64) * outputs * inputs
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    needed = tl.where(first < end, inputs, 0)  # tiles past an expert's last row have nothing to do
    for i0 in range(0, needed, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        inside = (i < inputs)[None, :]
        x_tile = tl.load(
            x + m.to(tl.int64)[:, None] * x_row + i[None, :], mask=real_m[:, None] & inside, other=0.0
        )
        w_place = n.to(tl.int64)[:, None] * inputs + i[None, :]
        w_tile = tl.load(base + w_place, mask=real_n[:, None] & inside, other=0.0)
        acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
    place = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])
