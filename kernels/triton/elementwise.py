"""Elementwise operations: logit softcap, gated activations, RMSNorm with fused residual addition. Where an
8-bit linear is next, activations and norms quantize their rows too.

A norm has one program a row, which keeps the row in registers between the sum and the scaling, so memory is
read once. The tile follows from the row's width alone: a row's sum is the same in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import LIMITED_CODE, SWIGLU_ALPHA, UNGATED, XIELU, Activation, LimitedSwiGLU, code_of
from .linear.quantize_activations import RowFormat, Rows8, left_arguments, left_constants, store_eight_bits
from .linear.tile_config import power_of_two, warps_for

BLOCK = 2048


def softcap(logits_RV: Tensor, cap: float) -> Tensor:
    rows, width = logits_RV.shape
    assert logits_RV.stride(1) == 1
    out_RV = torch.empty((rows, width), dtype=logits_RV.dtype, device=logits_RV.device)
    if rows:
        softcap_kernel[(rows, triton.cdiv(width, BLOCK))](
            out_RV, logits_RV, logits_RV.stride(0), cap, WIDTH=width, BLOCK=BLOCK, num_warps=8
        )
    return out_RV


@triton.jit
def softcap_kernel(
    out: tl.tensor, x: tl.tensor, x_row: tl.tensor, cap: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write cap * tanh(x / cap) for one tile of a row, float32. Reference: `softcap` in
    `kernels/reference/elementwise.py`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (cap * tanh(wide / cap)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh of float32, relative error below 1e-6.

    Near 0 it is a series: 1 - e^-2|x| would cancel there.
    """
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    s = size * size
    near = size + size * s * (-0.333333333 + s * (0.133333333 + s * (-0.0539682540 + s * 0.0218694885)))
    positive = tl.where(size < 0.25, near, far)
    return tl.where(x < 0.0, -positive, positive)


WITH_GELU_TANH, WITH_SWIGLU_OAI, WITH_RELU2 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
WITH_GELU, WITH_GELU_NEW, WITH_RELU = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
WITH_RELU2_GATED, WITH_GELU_GATED = tl.constexpr(7), tl.constexpr(9)
WITH_LIMIT, ALPHA = tl.constexpr(LIMITED_CODE), tl.constexpr(SWIGLU_ALPHA)


def gate_mul(gate_up_T2F: Tensor, activation: Activation | LimitedSwiGLU | XIELU) -> Tensor:
    return gate_rows(gate_up_T2F, activation, None)[0]


def gate_rows(
    gate_up_T2F: Tensor, activation: Activation | LimitedSwiGLU | XIELU, row_format: RowFormat | None
) -> tuple[Tensor, Rows8 | None]:
    """Return activation(gate) * up, and with `row_format` the quantized rows too; not of xIELU."""
    if isinstance(activation, XIELU):
        return _xielu(gate_up_T2F, activation), None
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // (1 if activation in UNGATED else 2)
    assert gate_up_T2F.stride(1) == 1
    device = gate_up_T2F.device
    out_TF = torch.empty((rows, width), dtype=gate_up_T2F.dtype, device=device)
    eight = None if row_format is None else Rows8.empty(rows, width, row_format, device)
    whole = row_format is not None and row_format.group is None
    # A scale for the whole row needs the row's largest number before any code is stored.
    block = power_of_two(width) if whole else BLOCK
    code, limit = code_of(activation)
    if rows:
        gate_kernel[(rows, triton.cdiv(width, block))](
            out_TF,
            *left_arguments(eight, row_format, out_TF),
            gate_up_T2F,
            gate_up_T2F.stride(0),
            WIDTH=width,
            BLOCK=block,
            ACTIVATION=code,
            LIMIT=limit,
            **left_constants(block, row_format),
            num_warps=warps_for(width) if whole else 8,
        )
    return out_TF, eight


def _xielu(x_TF: Tensor, numbers: XIELU) -> Tensor:
    assert x_TF.stride(1) == 1
    rows, width = x_TF.shape
    out_TF = torch.empty((rows, width), dtype=x_TF.dtype, device=x_TF.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        xielu_kernel[grid](out_TF, x_TF, x_TF.stride(0), *numbers, WIDTH=width, BLOCK=BLOCK, num_warps=8)
    return out_TF


@triton.jit(do_not_specialize=["alpha_p", "alpha_n", "beta", "eps"])
def xielu_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    alpha_p: tl.tensor,
    alpha_n: tl.tensor,
    beta: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write xIELU of one tile of a row. Near zero e^m - 1 - m is a series: the difference has no digits."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    given = tl.load(x + row * x_row + column, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    m = tl.where(wide > eps, eps, wide)  # NaN stays
    series = 1 / 5040 + m * (1 / 40320)
    series = 1 / 24 + m * (1 / 120 + m * (1 / 720 + m * series))
    series = m * m * (1 / 2 + m * (1 / 6 + m * series))
    rest = tl.where(m < -0.5, tl.exp(m) - 1.0 - m, series)
    curved = tl.where(wide > 0.0, alpha_p * wide * wide, alpha_n * (rest + (m - wide)))
    tl.store(out + row * WIDTH + column, (curved + beta * wide).to(given.dtype), mask=inside)


@triton.jit
def gated(
    x: tl.tensor, column: tl.tensor, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """Compute activation(gate) * up for a tile of columns; float32, rounded to the model's dtype after each
    of both steps.

    Activations are x / (1 + e^-z): SiLU has z = x; GELU by tanh, x (1 + tanh(y)) / 2, has z = 2 y; that of
    gpt-oss has z = 1.702 x, of limited numbers; that of `LimitedSwiGLU` is limited afterwards. BitNet's is
    the square of max(x, 0). Without a gate there are max(x, 0), its square, and GELU by erf or tanh.
    """
    inside = column < WIDTH
    gate = tl.load(x + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if ACTIVATION == WITH_RELU2:
        return tl.where(wide < 0.0, 0.0, wide * wide).to(gate.dtype)
    if ACTIVATION == WITH_RELU:
        return tl.where(wide < 0.0, 0.0, wide).to(gate.dtype)
    if ACTIVATION == WITH_GELU:
        return (0.5 * wide * (1.0 + tl.erf(0.7071067811865476 * wide))).to(gate.dtype)
    if ACTIVATION == WITH_GELU_NEW:
        y = wide * (1.5957691216057308 + 0.07135481282671556 * wide * wide)
        return (wide / (1.0 + tl.exp(-y))).to(gate.dtype)
    up = tl.load(x + WIDTH + column, mask=inside, other=0.0)
    z = wide
    if ACTIVATION == WITH_GELU_TANH:
        z = wide * (1.5957691216057308 + 0.07135481282671556 * wide * wide)
    elif ACTIVATION == WITH_SWIGLU_OAI:
        wide = tl.where(wide > LIMIT, LIMIT, wide)  # NaN stays
        z = ALPHA * wide
        limited = up.to(tl.float32)
        limited = tl.where(limited > LIMIT, LIMIT, tl.where(limited < -LIMIT, -LIMIT, limited))
        up = (limited + 1.0).to(gate.dtype)
    activated = (wide / (1.0 + tl.exp(-z))).to(gate.dtype)  # rounded where the reference rounds
    if ACTIVATION == WITH_LIMIT:
        limited = activated.to(tl.float32)
        activated = tl.where(limited > LIMIT, LIMIT, limited).to(gate.dtype)
        limited = up.to(tl.float32)
        up = tl.where(limited > LIMIT, LIMIT, tl.where(limited < -LIMIT, -LIMIT, limited)).to(gate.dtype)
    if ACTIVATION == WITH_RELU2_GATED:
        activated = tl.where(wide < 0.0, 0.0, wide * wide).to(gate.dtype)
    if ACTIVATION == WITH_GELU_GATED:
        activated = (0.5 * wide * (1.0 + tl.erf(0.7071067811865476 * wide))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["step"])
def gate_kernel(
    out: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Write activation(gate) * up for one tile of a row; with GROUP also its 8-bit codes and scales.

    Arithmetic is float32. Reference: `gate_mul` in `kernels/reference/elementwise.py`.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    result = gated(x + row * x_row, column, WIDTH, ACTIVATION, LIMIT)
    tl.store(out + row * WIDTH + column, result, mask=column < WIDTH)
    if GROUP:
        store_eight_bits(
            numbers, scales, step, given, result, row, first, WIDTH, BLOCK, GROUP, LARGEST, GIVEN
        )


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
