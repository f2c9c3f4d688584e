"""Products of blocks of E4M3 by PyTorch, which newer versions offer on some cards."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gpu.timing import Call
from llmbox.kernels.triton.gemm_fp8 import fp8_product
from llmbox.kernels.triton.linear import Blocks8
from llmbox.kernels.triton.quantise import Rows8

NEAR = 0.02
"""||torch - ours|| / ||ours||: sums of other order and precision, rounded to bfloat16."""


def products(rows: Rows8, packed: Sequence[Blocks8]) -> list[Call]:
    """One for each weight; none where this version or card refuses, or gives something else than ours."""
    scales = rows.scales.t().contiguous().t()  # column by column, as it wants them
    calls: list[Call] = [partial(product, rows.numbers, scales, one) for one in packed]
    try:
        found = calls[0]()
    except (RuntimeError, ValueError, NotImplementedError):
        return []
    ours = fp8_product(rows, packed[0].weight_OI, packed[0].scales, None, torch.bfloat16).double()
    assert isinstance(found, Tensor)
    return calls if (found.double() - ours).norm() <= NEAR * ours.norm() else []


def product(x_TI: Tensor, scales_TG: Tensor, packed: Blocks8) -> Tensor:
    return torch._scaled_mm(
        x_TI,
        packed.weight_OI.t(),
        scale_a=scales_TG,
        scale_b=packed.scales.t(),
        out_dtype=torch.bfloat16,
    )
