"""Mixture of experts in plain torch, on any kind of linear."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..op_types import Mixture
from ..ops import PackedLinear
from .elementwise import gate_mul


def route(logits_TX: Tensor, per_token: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Route rows to the top-K experts: ids [T, K] int64 and their weights [T, K] float32.

    The likeliest is first; of equally likely ones the lower number.
    """
    wide_TX = logits_TX.float()
    experts_TK = wide_TX.sort(dim=1, descending=True, stable=True).indices[:, :per_token]
    shares_TK = wide_TX.softmax(1).gather(1, experts_TK)
    return experts_TK, shares_TK / shares_TK.sum(1, keepdim=True) if normalised else shares_TK


def weigh(rows_TKE: Tensor, shares_TK: Tensor) -> Tensor:
    """Sum each row's K results times their weights: in float32, in that order, rounded once."""
    total_TE = rows_TKE[:, 0].float() * shares_TK[:, :1]
    for k in range(1, rows_TKE.shape[1]):
        total_TE.addcmul_(rows_TKE[:, k].float(), shares_TK[:, k : k + 1])
    return total_TE.to(rows_TKE.dtype)


def make_experts(
    linear: Callable[[PackedLinear, Tensor], Tensor],
) -> Callable[[Mixture, Tensor, Tensor], Tensor]:
    """Build `Ops.experts` on these linears. Experts are computed one after the other."""

    def experts(mixture: Mixture, x_TE: Tensor, logits_TX: Tensor) -> Tensor:
        experts_TK, shares_TK = route(logits_TX, mixture.per_token, mixture.normalised)
        rows_TKE = x_TE.new_empty(*experts_TK.shape, x_TE.shape[1])
        for expert, (gate_up, down) in enumerate(zip(mixture.gate_ups, mixture.downs, strict=True)):
            rows, places = torch.where(experts_TK == expert)
            if len(rows):
                rows_TKE[rows, places] = linear(down, gate_mul(linear(gate_up, x_TE[rows]), "silu"))
        return weigh(rows_TKE, shares_TK)

    return experts
