"""`Ops.experts` on the grouped product: rows are sorted by expert on the device, and nothing waits for it.

T rows, K experts of each, S rows of all experts, E hidden, F inner rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..experts import Mixture
from ..reference.experts import route, weigh
from .gate_mul import gate_rows
from .gemm_experts import experts_product
from .linear import Linear, row_format_of


def experts(mixture: Mixture, x_TE: Tensor, logits_TX: Tensor, *, fixed: bool = False) -> Tensor:
    """`fixed`: a row's bits never depend on its neighbours."""
    chosen_TK, shares_TK = route(logits_TX, mixture.per_token, mixture.normalised)
    sorted_S, order_S = chosen_TK.flatten().sort(stable=True)
    limits = torch.arange(mixture.count + 1, device=x_TE.device)
    starts_X1 = torch.searchsorted(sorted_S, limits).int()
    gate_up, down = one_of_all(mixture.gate_ups), one_of_all(mixture.downs)
    rows_SE = x_TE[order_S // mixture.per_token]
    gates_S2F = experts_product(rows_SE, gate_up, starts_X1, fixed=fixed)
    inner_SF, eight = gate_rows(gates_S2F, "silu", row_format_of(down))
    rows_TKE = x_TE.new_empty(*chosen_TK.shape, x_TE.shape[1])
    rows_TKE.view(-1, x_TE.shape[1])[order_S] = experts_product(
        inner_SF, down, starts_X1, eight=eight, fixed=fixed
    )
    return weigh(rows_TKE, shares_TK)


def one_of_all(linears: Sequence[Linear]) -> Linear:
    """The one linear that holds all experts."""
    (packed,) = linears
    return packed
