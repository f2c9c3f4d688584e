"""Mixture of experts in plain torch, on any kind of linear."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..lora import ExpertAdapters
from ..op_types import ExpertResults, Mixture, Routing
from ..ops import PackedLinear
from .elementwise import gate_mul
from .lora import add_expert

PLAIN = Routing()
LEAST_TOTAL = 1e-20
"""Least sum of weights that are normalized: those of sigmoids may all be 0."""


def route(
    logits_TX: Tensor, per_token: int, normalized: bool, routing: Routing = PLAIN
) -> tuple[Tensor, Tensor]:
    """Route rows to the top-K experts: ids [T, K] int64 and their weights [T, K] float32.

    The best is first; of equally good ones the lower number.
    """
    wide_TX = logits_TX.float()
    if routing.jitter:
        return route_sparsely(wide_TX, per_token, routing.jitter)
    scores_TX = wide_TX.softmax(1) if routing.scoring == "softmax" else wide_TX.sigmoid()
    # Logits have the order of their scores, and more of them differ.
    by_logits = routing.is_plain or routing.scoring == "sigmoid_of_logits"
    chosen_by_TX = wide_TX if by_logits else scores_TX
    if routing.correction_X is not None:
        chosen_by_TX = chosen_by_TX + routing.correction_X
    if routing.groups > 1:
        chosen_by_TX = in_best_groups(chosen_by_TX, routing)
    experts_TK = best(chosen_by_TX, per_token)
    shares_TK = scores_TX.gather(1, experts_TK)
    if normalized:
        shares_TK = shares_TK / (shares_TK.sum(1, keepdim=True) + LEAST_TOTAL)
    if routing.factors_X is not None:
        shares_TK = shares_TK * routing.factors_X[experts_TK]
    return experts_TK, shares_TK * routing.scale


def route_sparsely(logits_TX: Tensor, per_token: int, jitter: float) -> tuple[Tensor, Tensor]:
    """Route by SparseMixer, as `Routing.jitter` says. Liu et al., "GRIN", 2024, section 2.2."""
    experts_TK, shares = best(logits_TX, per_token), []
    left_TX = logits_TX.clone()
    for k in range(per_token):
        chosen_T1 = experts_TK[:, k : k + 1]
        most_T1 = logits_TX.gather(1, chosen_T1)
        is_far_TX = (most_T1 - logits_TX) / logits_TX.abs().maximum(most_T1) > 2 * jitter
        shares.append(left_TX.masked_fill(is_far_TX, -torch.inf).softmax(1).gather(1, chosen_T1))
        left_TX.scatter_(1, chosen_T1, -torch.inf)
    return experts_TK, torch.cat(shares, 1)


def best(scores_TX: Tensor, count: int) -> Tensor:
    return scores_TX.sort(dim=1, descending=True, stable=True).indices[:, :count]


def in_best_groups(scores_TX: Tensor, routing: Routing) -> Tensor:
    """Return -inf for experts outside the best groups."""
    scores_TGn = scores_TX.view(len(scores_TX), routing.groups, -1)
    totals_TG = scores_TGn.sort(dim=2, descending=True).values[..., : routing.group_best].sum(2)
    kept_TG = torch.zeros_like(totals_TG, dtype=torch.bool)
    kept_TG.scatter_(1, best(totals_TG, routing.top_groups), True)
    return scores_TGn.masked_fill(~kept_TG.unsqueeze(2), -torch.inf).flatten(1)


def weigh(
    rows_TKE: Tensor, shares_TK: Tensor, shared_TE: Tensor | None = None, gate_T1: Tensor | None = None
) -> Tensor:
    """Sum each row's K results times their weights, and the shared row times the sigmoid of its gate: in
    float32, in that order, rounded once.
    """
    total_TE = rows_TKE[:, 0].float() * shares_TK[:, :1]
    for k in range(1, rows_TKE.shape[1]):
        total_TE.addcmul_(rows_TKE[:, k].float(), shares_TK[:, k : k + 1])
    if shared_TE is not None:
        gated = 1.0 if gate_T1 is None else gate_T1.float().sigmoid()
        total_TE += shared_TE.float() * gated
    return total_TE.to(rows_TKE.dtype)


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Operations of experts on these linears. Experts are computed one after the other."""

    linear: Callable[[PackedLinear, Tensor], Tensor]

    def experts(
        self,
        mixture: Mixture,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None = None,
        gate_T1: Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        experts_TK, shares_TK = _chosen(mixture, logits_TX)
        rows_TKE = self._results(mixture, x_TE, experts_TK, shares_TK, adapters)
        if mixture.routing.scales_inputs:
            shares_TK = torch.ones_like(shares_TK)
        return weigh(rows_TKE, shares_TK, shared_TE, gate_T1)

    def expert_results(
        self, mixture: Mixture, x_TE: Tensor, logits_TX: Tensor, adapters: ExpertAdapters | None = None
    ) -> ExpertResults:
        """Deal the rows of an expert to its holders in turns."""
        owners = mixture.owners
        assert owners is not None
        experts_TK, shares_TK = _chosen(mixture, logits_TX)
        owners_TK = torch.empty(experts_TK.shape, dtype=torch.int32, device=x_TE.device)
        for expert, holders in enumerate(owners.holders):
            found = torch.nonzero(experts_TK == expert)
            turns = torch.arange(len(found), device=x_TE.device) % len(holders)
            owners_TK[found[:, 0], found[:, 1]] = torch.tensor(holders, dtype=torch.int32)[turns]
        if owners.load_R is not None:
            owners.load_R.add_(torch.bincount(owners_TK.flatten(), minlength=owners.ranks))
        mine_TK = experts_TK.masked_fill(owners_TK != owners.rank, -1)
        rows_TKE = self._results(mixture, x_TE, mine_TK, shares_TK, adapters)
        if mixture.routing.scales_inputs:
            shares_TK = torch.ones_like(shares_TK)
        return ExpertResults(rows_TKE.flatten(1), shares_TK, owners_TK)

    def combine_experts(
        self, results: ExpertResults | None, shared_TE: Tensor | None = None, gate_T1: Tensor | None = None
    ) -> Tensor:
        if results is not None:
            rows_TKE = results.rows_TKE.view(*results.shares_TK.shape, -1)
            return weigh(rows_TKE, results.shares_TK, shared_TE, gate_T1)
        assert shared_TE is not None
        gated = 1.0 if gate_T1 is None else gate_T1.float().sigmoid()
        return (shared_TE.float() * gated).to(shared_TE.dtype)

    def _results(
        self,
        mixture: Mixture,
        x_TE: Tensor,
        experts_TK: Tensor,
        shares_TK: Tensor,
        adapters: ExpertAdapters | None,
    ) -> Tensor:
        """Return [T, K, E], zeros for experts that are not here."""
        rows_TKE = x_TE.new_zeros(*experts_TK.shape, x_TE.shape[1])
        for number, (gate_up, down) in enumerate(zip(mixture.gate_ups, mixture.downs, strict=True)):
            rows, places = torch.where(experts_TK == mixture.here[number])
            if len(rows):
                inputs = x_TE[rows]
                if mixture.routing.scales_inputs:
                    inputs = (inputs.float() * shares_TK[rows, places].unsqueeze(1)).to(x_TE.dtype)
                gate_ups = self.linear(gate_up, inputs)
                if adapters is not None:
                    add_expert(adapters.gate_ups, number, inputs, gate_ups, rows, adapters.rows)
                inner = gate_mul(gate_ups, mixture.activation)
                results = self.linear(down, inner)
                if adapters is not None:
                    add_expert(adapters.downs, number, inner, results, rows, adapters.rows)
                rows_TKE[rows, places] = results
        return rows_TKE


def _chosen(mixture: Mixture, logits_TX: Tensor) -> tuple[Tensor, Tensor]:
    """Route the rows, and count those of each expert."""
    experts_TK, shares_TK = route(logits_TX, mixture.per_token, mixture.normalized, mixture.routing)
    if mixture.load_X is not None:
        mixture.load_X.add_(torch.bincount(experts_TK.flatten(), minlength=mixture.count))
    return experts_TK, shares_TK
