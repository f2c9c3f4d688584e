"""Reference of `LoraOps`: what adapters add to the results of linears and experts, in plain torch.

T rows of the step, S rows of one expert, I inputs and O outputs of a linear, R ranks, V vocabulary, E hidden.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..lora import AdaptedRows, ExpertLora, LoraOps, LoraSite, LoraWeights, unload


def reference_lora() -> LoraOps:
    """Return the meaning of the operations, in plain torch."""
    return LoraOps(_load, _load_table, unload, _add, _embed, _load_experts, takes_tiles=True)


def _load(site: LoraSite, slot: int, weights: LoraWeights) -> None:
    site.weights[slot] = weights


def _load_table(site: LoraSite, slot: int, table_VE: Tensor) -> None:
    site.tables[slot] = table_VE


def _load_experts(site: LoraSite, slot: int, _count: int, batches: Sequence[ExpertLora]) -> None:
    site.experts[slot] = {
        expert: LoraWeights(
            batch.weights.a_RI[n],
            batch.weights.scales_R,
            tuple(replace(piece, b_Or=piece.b_Or[n]) for piece in batch.weights.pieces),
        )
        for batch in batches
        for n, expert in enumerate(batch.experts)
    }


def _add(site: LoraSite, x_TI: Tensor, y_TO: Tensor, rows: AdaptedRows) -> None:
    for slot, index in rows.runs():
        weights = site.weights.get(slot)
        if weights is not None:
            _add_rows(weights, x_TI, y_TO, index)


def _add_rows(weights: LoraWeights, x_TI: Tensor, y_TO: Tensor, index: Tensor) -> None:
    low_R = x_TI[index].float() @ weights.a_RI.float().T * weights.scales_R
    for piece in weights.pieces:
        columns = slice(piece.start, piece.stop)
        part_R = low_R[:, piece.first : piece.first + piece.b_Or.shape[1]]
        added = y_TO[index, columns].float() + part_R @ piece.b_Or.float().T
        y_TO[index, columns] = added.to(y_TO.dtype)


def add_expert(
    site: LoraSite, expert: int, x_SI: Tensor, y_SO: Tensor, rows_S: Tensor, rows: AdaptedRows
) -> None:
    """Add to the results of one expert for rows `rows_S` of the step, in plain torch."""
    for slot, index in rows.runs():
        weights = site.experts.get(slot, {}).get(expert)
        if weights is not None:
            _add_rows(weights, x_SI, y_SO, torch.isin(rows_S, index).nonzero().flatten())


def _embed(site: LoraSite, ids_T: Tensor, x_TE: Tensor, scale: float, rows: AdaptedRows) -> None:
    for slot, index in rows.runs():
        table_VE = site.tables.get(slot)
        if table_VE is not None:
            x_TE[index] = (table_VE[ids_T[index]].float() * scale).to(x_TE.dtype)
