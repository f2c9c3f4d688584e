"""Norms, gated activations and softcaps with the bits of C++."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...activation import UNGATED, Activation, LimitedSwiGLU, code_of
from ..elementwise import ALPHA, WITH_GELU_TANH, WITH_LIMIT, WITH_RELU2, WITH_RELU2_GATED, WITH_SWIGLU_OAI
from ..linear.tile_config import power_of_two as whole_tile
from .arithmetic import (
    SUM_LANES,
    constant,
    exp_negative,
    multiply_add,
    over_lanes,
    quotient,
    rounded,
    tanh,
    widen,
)

ROWS = 32
"""Rows of one program."""
BLOCK = 1024
"""Columns of one program of an elementwise operation."""


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add x [T, E] or [T, n, D] to the residual [T, E], if there is one, and norm: x / sqrt(mean(x^2) + eps)
    * weight, a new tensor.
    """
    width = weight.shape[-1]
    groups = weight.shape[0] if weight.dim() == 2 else 1
    assert x.stride(-1) == 1
    assert x.dim() == 2 or x.stride(1) == width
    assert residual is None or residual.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        portable_norm_kernel[(triton.cdiv(len(x), ROWS), groups)](
            out,
            out if residual is None else residual,
            x,
            weight,
            len(x),
            x.stride(0),
            eps,
            WIDTH=width,
            PADDED=whole_tile(width),
            ROWS=ROWS,
            RESIDUAL=residual is not None,
            enable_fp_fusion=False,
        )
    return out


def norm_sum(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Implement `Ops.add_rms_norm`."""
    return norm(x_TE, residual_TE, weight_E, eps)


@triton.jit
def inverse_root(total: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Return 1 / sqrt(total / WIDTH + eps)."""
    mean = quotient(total, constant(WIDTH, total))
    return quotient(constant(1.0, total), tl.sqrt_rn(mean + eps))


@triton.jit(do_not_specialize=["rows"])
def portable_norm_kernel(
    out: tl.tensor,
    residual: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    x_row: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
) -> None:
    """Norm one group of ROWS rows. C++: `norm_row` in `native/elementwise.h`."""
    m, group = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    real = (m < rows)[:, None]
    from_x = x + (m.to(tl.int64) * x_row + group * WIDTH)[:, None]
    to = (m.to(tl.int64) * tl.num_programs(1) + group)[:, None] * WIDTH
    squares = tl.zeros((ROWS, SUM_LANES), tl.float32)
    for first in range(0, WIDTH, SUM_LANES):
        i = first + tl.arange(0, SUM_LANES)[None, :]
        v = summed(from_x + i, residual + to + i, real & (i < WIDTH), RESIDUAL)
        squares = multiply_add(v, v, squares)
    scale = inverse_root(over_lanes(squares, ROWS), eps, WIDTH)
    i = tl.arange(0, PADDED)[None, :]
    inside = real & (i < WIDTH)
    v = summed(from_x + i, residual + to + i, inside, RESIDUAL)
    if RESIDUAL:
        tl.store(residual + to + i, rounded(v, residual.dtype.element_ty), mask=inside)
    by = widen(tl.load(weight + group * WIDTH + i, mask=i < WIDTH, other=0.0))
    tl.store(out + to + i, rounded(v * scale[:, None] * by, out.dtype.element_ty), mask=inside)


@triton.jit
def summed(x: tl.tensor, residual: tl.tensor, inside: tl.tensor, RESIDUAL: tl.constexpr) -> tl.tensor:
    """Load numbers, plus those of the residual and rounded to its dtype where there is one: float32."""
    v = widen(tl.load(x, mask=inside, other=0.0))
    if RESIDUAL:
        v = widen(rounded(widen(tl.load(residual, mask=inside, other=0.0)) + v, residual.dtype.element_ty))
    return v


def gate_mul(gate_up_T2F: Tensor, activation: Activation | LimitedSwiGLU) -> Tensor:
    """Return activation(gate) * up, new tensor [T, F]."""
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // (1 if activation in UNGATED else 2)
    assert gate_up_T2F.stride(1) == 1
    out_TF = torch.empty((rows, width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    code, limit = code_of(activation)
    if rows:
        portable_gate_kernel[(rows, triton.cdiv(width, BLOCK))](
            out_TF,
            gate_up_T2F,
            gate_up_T2F.stride(0),
            WIDTH=width,
            BLOCK=min(BLOCK, whole_tile(width)),
            ACTIVATION=code,
            LIMIT=limit,
            enable_fp_fusion=False,
        )
    return out_TF


@triton.jit
def portable_gate_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """Write activation(gate) * up for one tile of a row, rounded once. C++: `gate_mul` in
    `native/elementwise.h`.
    """
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = i < WIDTH, x + row * x_row + i
    gate = widen(tl.load(at, mask=inside, other=0.0))
    if ACTIVATION == WITH_RELU2:
        result = tl.where(gate < 0.0, 0.0, gate * gate)
    else:
        up = widen(tl.load(at + WIDTH, mask=inside, other=0.0))
        if ACTIVATION == WITH_SWIGLU_OAI:
            gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        if ACTIVATION == WITH_LIMIT:
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        z = gate
        if ACTIVATION == WITH_GELU_TANH:
            factor = constant(7.13548163e-2, gate)
            z = multiply_add(gate * gate * gate, factor, gate * 1.59576912)
        if ACTIVATION == WITH_SWIGLU_OAI:
            z = gate * ALPHA
        e = exp_negative(-tl.abs(z))
        activated = quotient(gate * tl.where(z < 0.0, e, 1.0), 1.0 + e)
        if ACTIVATION == WITH_LIMIT:
            activated = tl.where(activated > LIMIT, LIMIT, activated)
        result = activated * up
        if ACTIVATION == WITH_RELU2_GATED:
            result = tl.where(gate < 0.0, 0.0, gate * gate) * up
    tl.store(out + row * WIDTH + i, rounded(result, out.dtype.element_ty), mask=inside)


def softcap(logits_RV: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) of float32, new tensor."""
    rows, width = logits_RV.shape
    assert logits_RV.stride(1) == 1
    assert logits_RV.dtype == torch.float32
    out_RV = torch.empty((rows, width), dtype=torch.float32, device=logits_RV.device)
    if rows:
        portable_softcap_kernel[(rows, triton.cdiv(width, BLOCK))](
            out_RV, logits_RV, logits_RV.stride(0), cap, WIDTH=width, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return out_RV


@triton.jit
def portable_softcap_kernel(
    out: tl.tensor, x: tl.tensor, x_row: tl.tensor, cap: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Cap one tile of a row. C++: `SoftcapOp` in `native/elementwise.h`."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * x_row + i, mask=i < WIDTH, other=0.0)
    tl.store(
        out + row * WIDTH + i, cap * tanh(quotient(v, tl.zeros(v.shape, tl.float32) + cap)), mask=i < WIDTH
    )
