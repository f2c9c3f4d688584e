"""`Ops.experts` on the grouped product: rows are sorted by expert on the device, and nothing waits for it.

T rows, K experts of each, E hidden, F inner rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..experts import Mixture
from ..reference.experts import route, weigh
from .gate_mul import gate_mul
from .gemm_experts import experts_product
from .linear import Plain


def experts(mixture: Mixture, x_TE: Tensor, logits_TX: Tensor, *, fixed: bool = False) -> Tensor:
    """`fixed`: a row's bits never depend on its neighbours."""
    chosen_TK, shares_TK = route(logits_TX, mixture.per_token, mixture.normalised)
    sorted_S, order_S = chosen_TK.flatten().sort(stable=True)
    limits = torch.arange(mixture.count + 1, device=x_TE.device)
    starts_X1 = torch.searchsorted(sorted_S, limits).int()
    gate_up_X2FE, down_XEF = stacked(mixture.gate_ups, mixture.count), stacked(mixture.downs, mixture.count)
    rows_SE = x_TE[order_S // mixture.per_token]
    inner_SF = gate_mul(experts_product(rows_SE, gate_up_X2FE, starts_X1, fixed=fixed), "silu")
    rows_TKE = x_TE.new_empty(*chosen_TK.shape, x_TE.shape[1])
    rows_TKE.view(-1, x_TE.shape[1])[order_S] = experts_product(inner_SF, down_XEF, starts_X1, fixed=fixed)
    return weigh(rows_TKE, shares_TK)


def stacked(linears: Sequence[Plain], count: int) -> Tensor:
    """[X, O, I] of the one linear that holds all experts."""
    (packed,) = linears
    assert isinstance(packed, Plain), "planned only without rounding"
    outputs, inputs = packed.weight_OI.shape
    return packed.weight_OI.view(count, outputs // count, inputs)
