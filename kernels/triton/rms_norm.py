"""RMSNorm, x / sqrt(mean(x^2) + eps) * weight, with fused residual addition and quantization.

One program a row keeps the row in registers between the sum and the scaling, so memory is read once. The tile
follows from the row's width alone: a row's sum is the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear.quantize_activations import RowFormat, Rows8, left_arguments, left_constants, store_eight_bits
from .linear.tile_config import power_of_two, warps_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dim() == 2:
        return norm_heads(x, weight, eps)
    return norm_rows(x, None, weight, eps, None)[0]


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return norm_rows(x_TE, residual_TE, weight_E, eps, None)[0]


def norm_rows(
    x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float, row_format: RowFormat | None
) -> tuple[Tensor, Rows8 | None]:
    """Return the norm, and with `row_format` the quantized rows too."""
    rows, width = x_TE.shape
    assert x_TE.stride(1) == 1
    assert residual_TE is None or residual_TE.is_contiguous()
    out_TE = torch.empty((rows, width), dtype=x_TE.dtype, device=x_TE.device)
    eight = None if row_format is None else Rows8.empty(rows, width, row_format, x_TE.device)
    block = power_of_two(width)
    if rows:
        norm_kernel[(rows,)](
            out_TE,
            out_TE if residual_TE is None else residual_TE,
            *left_arguments(eight, row_format, out_TE),
            x_TE,
            weight_E,
            x_TE.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            RESIDUAL=residual_TE is not None,
            **left_constants(block, row_format),
            num_warps=warps_for(width),
        )
    return out_TE, eight


@triton.jit(do_not_specialize=["step"])
def norm_kernel(
    out: tl.tensor,
    residual: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    x_row: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Add the residual (RESIDUAL) and norm one row: x / sqrt(mean(x^2) + eps) * weight, all in float32.

    The sum is rounded to the model's dtype before the norm reads it. With GROUP the 8-bit codes and scales
    are stored too. Reference: `add_rms_norm` in `kernels/reference/elementwise.py`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        place = residual + row * WIDTH + column
        added = values + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        stored = added.to(residual.dtype.element_ty)  # the norm reads what later layers will read
        tl.store(place, stored, mask=inside)
        values = stored.to(tl.float32)
    store_norm(
        out, numbers, scales, step, given, weight, values, row, eps, WIDTH, BLOCK, GROUP, LARGEST, GIVEN
    )


@triton.jit
def store_norm(
    out: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    weight: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Norm and store a row of float32 `values`; those beyond WIDTH must be zero. With GROUP also
    quantized.
    """
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    inverse = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = (values * inverse * weights).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, normed, mask=inside)
    if GROUP:
        store_eight_bits(numbers, scales, step, given, normed, row, 0, WIDTH, BLOCK, GROUP, LARGEST, GIVEN)


def norm_heads(x_TnD: Tensor, weight_nD: Tensor, eps: float) -> Tensor:
    rows, heads, head_dim = x_TnD.shape
    assert x_TnD.stride()[1:] == (head_dim, 1)
    out = torch.empty((rows, heads, head_dim), dtype=x_TnD.dtype, device=x_TnD.device)
    if rows:
        norm_heads_kernel[(rows, heads)](
            out, x_TnD, weight_nD, x_TnD.stride(0), eps, D=head_dim, D_PAD=power_of_two(head_dim), num_warps=1
        )
    return out


@triton.jit
def norm_heads_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    x_row: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
) -> None:
    """Norm one head of one row, float32: x / sqrt(mean(x^2) + eps) * weight.

    Reference: `rms_norm` in `kernels/reference/elementwise.py`.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    inside = d < D
    values = tl.load(x + row * x_row + head * D + d, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    weights = tl.load(weight + head * D + d, mask=inside, other=0.0).to(tl.float32)
    place = out + (row * tl.num_programs(1) + head) * D + d
    tl.store(place, (values * inverse * weights).to(out.dtype.element_ty), mask=inside)
