"""Products of 8-bit rows and weights: how many programs, and the sum of their parts; the kernels differ."""

from typing import Any

import torch
import triton
from torch import Tensor

from .gemm import STEP, add_splits, num_splits
from .quantise import Rows8
from .tiles import tile_of_8_bits


def product_of_8_bits(
    kernel: Any,
    x: Rows8,
    weight: Tensor,
    scales: Tensor,
    bias_O: Tensor | None,
    outputs: int,
    group: int,
    dtype: torch.dtype,
    *,
    fixed: bool,
    **constants: Any,
) -> Tensor:
    """[T, O] in `dtype`. `group`: inputs of one turn of the kernel's loop; `constants`: what it alone has.

    With `fixed` a row's bits do not depend on the number of rows.
    """
    rows, inputs = x.numbers.shape
    device = x.numbers.device
    assert rows < 2 or x.scales.stride(0) == 1
    out_TO = torch.empty((rows, outputs), dtype=dtype, device=device)
    if not rows:
        return out_TO
    tile = tile_of_8_bits(device, rows, fixed=fixed)
    row_tiles, columns = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns)
    steps = triton.cdiv(inputs, group)
    splits = num_splits(device, columns if fixed else columns * row_tiles, steps * group // STEP)
    target = out_TO
    if splits > 1:
        target = torch.empty((splits, rows, outputs), dtype=torch.float32, device=device)
    kernel[(row_tiles, columns, splits)](
        target,
        x.numbers,
        x.scales,
        x.scales.stride(1),
        weight,
        scales,
        out_TO if bias_O is None else bias_O,
        rows,
        outputs,
        inputs,
        triton.cdiv(steps, splits),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GROUP=group,
        BIAS=bias_O is not None and splits == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants,
    )
    if splits > 1:
        add_splits(out_TO, target, bias_O)
    return out_TO
