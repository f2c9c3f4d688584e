"""Gates and norms around recurrent layers and gated attention. Results are new tensors: 8-bit rows that an
operation before may have written belong to its own result (`FusedActivationQuant`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.tile_config import power_of_two, warps_for
from .scan import softplus

BLOCK = 1024


def gated_norm(x_TnD: Tensor, gate_TnD: Tensor, weight_nD: Tensor, eps: float, norm_first: bool) -> Tensor:
    """Implement `RecurrentOps.gated_norm`."""
    rows, groups, width = x_TnD.shape
    assert x_TnD.stride()[1:] == gate_TnD.stride()[1:] == (width, 1)
    out = torch.empty((rows, groups * width), dtype=x_TnD.dtype, device=x_TnD.device)
    if rows:
        gated_norm_kernel[(rows, groups)](
            out, x_TnD, gate_TnD, weight_nD, x_TnD.stride(0), gate_TnD.stride(0), eps,
            D=width, D_PAD=power_of_two(width), NORM_FIRST=norm_first, num_warps=warps_for(width),
        )  # fmt: skip
    return out


@triton.jit
def gated_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    x_row: tl.tensor,
    gate_row: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    NORM_FIRST: tl.constexpr,
) -> None:
    """Norm one group of one row, and multiply by silu(gate) after or before.

    Reference: `gated_norm` in `kernels/reference/recurrent.py`.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    inside, at = d < D, group * D + d
    values = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    gates = gates / (1.0 + tl.exp(-gates))
    if not NORM_FIRST:
        values *= gates
    values *= tl.rsqrt(tl.sum(values * values, 0) / D + eps)
    values *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if NORM_FIRST:
        values *= gates
    place = out + (row * tl.num_programs(1) + group) * D + d
    tl.store(place, values.to(out.dtype.element_ty), mask=inside)


def sigmoid_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    """Implement `RecurrentOps.sigmoid_mul` with a new tensor."""
    return _multiply(x_TF, gate_TF, "sigmoid")


def silu_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    """Implement `RecurrentOps.silu_mul` with a new tensor."""
    return _multiply(x_TF, gate_TF, "silu")


def softplus_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    """Implement `RecurrentOps.softplus_mul` with a new tensor."""
    return _multiply(x_TF, gate_TF, "softplus")


def _multiply(x_TF: Tensor, gate_TF: Tensor, function: str) -> Tensor:
    rows, width = x_TF.shape
    assert x_TF.stride(1) == gate_TF.stride(1) == 1
    out_TF = torch.empty((rows, width), dtype=x_TF.dtype, device=x_TF.device)
    if rows:
        gate_rows_kernel[(rows, triton.cdiv(width, BLOCK))](
            out_TF, x_TF, gate_TF, x_TF.stride(0), gate_TF.stride(0),
            WIDTH=width, BLOCK=BLOCK, FUNCTION=function, num_warps=4,
        )  # fmt: skip
    return out_TF


@triton.jit
def gate_rows_kernel(
    out: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    x_row: tl.tensor,
    gate_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
) -> None:
    """Write x times the FUNCTION of gate for one tile of a row, float32."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gates))
    if FUNCTION == "softplus":
        share = softplus(gates)
    if FUNCTION == "silu":
        share *= gates
    tl.store(out + row * WIDTH + column, (values * share).to(out.dtype.element_ty), mask=inside)


def mul_add(x_TN: Tensor, by_N: Tensor, added_TN: Tensor | None) -> Tensor:
    """Implement `RecurrentOps.mul_add` with a new tensor."""
    rows, width = x_TN.shape
    assert x_TN.stride(1) == 1
    assert added_TN is None or added_TN.is_contiguous()
    out_TN = torch.empty((rows, width), dtype=x_TN.dtype, device=x_TN.device)
    if rows:
        mul_add_kernel[(rows, triton.cdiv(width, BLOCK))](
            out_TN, x_TN, by_N, out_TN if added_TN is None else added_TN, x_TN.stride(0),
            WIDTH=width, BLOCK=BLOCK, ADDED=added_TN is not None, num_warps=4,
        )  # fmt: skip
    return out_TN


@triton.jit
def mul_add_kernel(
    out: tl.tensor,
    x: tl.tensor,
    by: tl.tensor,
    added: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
) -> None:
    """Write x by + added for one tile of a row, float32."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    values *= tl.load(by + column, mask=inside, other=0.0)
    if ADDED:
        values += tl.load(added + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=inside)
