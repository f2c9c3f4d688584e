from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    weight_OI: Tensor
    bias_O: Tensor | None


def pack_linear(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
    return Linear(weight_OI, bias_O)


# MKL sums the rows of small products in another order than those of large ones: seen for every row count
# below 12 except 4 and 8 (AVX512). Padding to 8 keeps "one row, one result" in float32.
MIN_ROWS = 8
MKL_ODD_ROWS = 12


def linear(packed: Linear, x_TI: Tensor) -> Tensor:
    rows = x_TI.shape[0]
    if x_TI.device.type != "cpu" or x_TI.dtype != torch.float32 or rows >= MKL_ODD_ROWS or rows == MIN_ROWS:
        return F.linear(x_TI, packed.weight_OI, packed.bias_O)
    padded = MIN_ROWS if rows < MIN_ROWS else MKL_ODD_ROWS
    return F.linear(F.pad(x_TI, (0, 0, 0, padded - rows)), packed.weight_OI, packed.bias_O)[:rows]
