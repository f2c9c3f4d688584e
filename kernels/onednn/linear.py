from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.linear import Linear
from ..reference.linear import linear as plain_linear

ROWS_HINT = 64
"""The packed layout is chosen for this many rows; it serves fewer and more as well."""
SMALL = 1 << 18
"""Weights of fewer numbers stay plain: a call into oneDNN costs 20 us, one into MKL 6 us."""


PACKED = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    weight: Tensor
    """Opaque to torch: only `_linear_pointwise` reads it."""
    bias_O: Tensor | None


def pack_linear(weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear | Linear:
    if weight_OI.numel() < SMALL or weight_OI.dtype not in PACKED:
        return Linear(weight_OI, bias_O)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS_HINT)  # noqa: SLF001
    return PackedLinear(packed, bias_O)


def linear(packed: PackedLinear | Linear, x_TI: Tensor) -> Tensor:
    """A tied embedding stays plain: its rows are read too, and a packed copy would cost memory."""
    if isinstance(packed, Linear):
        return plain_linear(packed, x_TI)
    # In float32 a single row is summed in another order than two or more.
    alone = len(x_TI) == 1 and x_TI.dtype == torch.float32
    x_TI = F.pad(x_TI, (0, 0, 0, 1)) if alone else x_TI
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed.weight, packed.bias_O, "none", [], "")  # noqa: SLF001
    return out[:1] if alone else out
