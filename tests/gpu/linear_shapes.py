"""The five products of an 8B model by cuBLAS, by our kernel, and for few rows by one without tensor cores.

Those of few outputs (`o` and `down`) decide what a decoding step takes beside attention.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton import language as tl

from gpu import kernel_speed
from gpu.kernel_speed import Work, randn
from gpu.timing import Call
from llmbox.kernels.triton.linear import gemm

PRODUCTS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
"""Outputs and inputs."""
ROWS = (1, 8, 64, 256, 8192)
FEW = 8
"""Rows up to which a program may keep all of them in registers."""
BLOCK, WARPS = 1024, 4
"""Inputs that a program of `gemv_kernel` reads at once."""


def all_work() -> Iterator[Callable[[], Work]]:
    for rows in ROWS:
        for name in PRODUCTS:
            yield partial(product, name, rows)


def product(name: str, rows: int) -> Work:
    outputs, inputs = PRODUCTS[name]
    weight = randn(outputs, inputs)
    sets = max(1, min(4, kernel_speed.SETS_BYTES // weight.nbytes))
    weights = [weight, *(weight.clone() for _ in range(sets - 1))]
    x = randn(rows, inputs)
    variants: dict[str, Sequence[Call]] = {
        "cuBLAS": [partial(F.linear, x, one) for one in weights],
        "Triton": [partial(gemm.product, x, one, None) for one in weights],
    }
    if rows <= FEW:
        variants["GEMV"] = [partial(gemv, x, one) for one in weights]
    moved = weight.nbytes + 2 * rows * (inputs + outputs)
    label = f"{name} {inputs} -> {outputs}, {rows} rows, cuBLAS"
    return Work(label, moved, 2 * rows * weight.numel(), "bf16", variants)


def gemv(x_TI: Tensor, weight_OI: Tensor, outputs_each: int = 4) -> Tensor:
    """Up to FEW rows, without tensor cores: each weight is read once and multiplied in float32."""
    rows, outputs = len(x_TI), len(weight_OI)
    out_TO = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    grid = (triton.cdiv(outputs, outputs_each),)
    most = triton.next_power_of_2(rows)  # what is read at once shrinks, so that all sums stay in registers
    sizes = {"ROWS": most, "OUTPUTS": outputs_each, "BLOCK": BLOCK // most}
    gemv_kernel[grid](out_TO, x_TI, weight_OI, rows, outputs, weight_OI.shape[1], **sizes, num_warps=WARPS)
    return out_TO


@triton.jit
def gemv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, BLOCK)
    sums = tl.zeros((ROWS, OUTPUTS, BLOCK), tl.float32)
    for start in range(0, inputs, BLOCK):
        at = start + place
        x_offsets = row[:, None] * inputs + at[None, :]
        x = tl.load(x_ptr + x_offsets, (row < rows)[:, None] & (at < inputs)[None, :], 0.0)
        offsets = column[:, None].to(tl.int64) * inputs + at[None, :]
        weight = tl.load(weight_ptr + offsets, (column < outputs)[:, None] & (at < inputs)[None, :], 0.0)
        sums += x[:, None, :].to(tl.float32) * weight[None, :, :].to(tl.float32)
    total = tl.sum(sums, 2)
    target = row[:, None] * outputs + column[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), inside)
