"""Logit softcap: cap * tanh(x / cap), which keeps numbers within +-cap."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
