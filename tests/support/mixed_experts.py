"""Mixtures of experts with adapters in slots, on some kernels."""

import torch
from torch import Tensor

from llmbox.kernels.lora import (
    TILE_ROWS,
    AdaptedRows,
    ExpertAdapters,
    ExpertLora,
    LoraPiece,
    LoraRows,
    LoraSite,
    LoraTiles,
    LoraWeights,
)
from llmbox.kernels.op_types import Mixture, Routing
from llmbox.kernels.ops import Ops

HIDDEN, INNER, COUNT = 72, 40, 6
SOME = {0: (0, 2, 3), 5: (0, 1, 2, 3, 4, 5), 63: (4,)}
"""Experts that the adapter of each slot changes."""


def expert_lora(experts: tuple[int, ...], rank: int, inputs: int, outputs: int, seed: int) -> ExpertLora:
    """An adapter of two parts of the outputs; those between them are left."""
    torch.manual_seed(seed)
    count, half = len(experts), outputs // 2
    pieces = (
        LoraPiece(0, half - 1, 0, torch.randn(count, half - 1, rank)),
        LoraPiece(half, outputs, rank, torch.randn(count, outputs - half, 2)),
    )
    a_XRI = torch.randn(count, rank + 2, inputs) / inputs**0.5
    return ExpertLora(experts, LoraWeights(a_XRI, torch.rand(rank + 2), pieces))


def in_dtype(lora: ExpertLora, dtype: torch.dtype) -> ExpertLora:
    weights = lora.weights
    pieces = tuple(LoraPiece(p.start, p.stop, p.first, p.b_Or.to(dtype)) for p in weights.pieces)
    return ExpertLora(lora.experts, LoraWeights(weights.a_RI.to(dtype), weights.scales_R, pieces))


def of_rank(lora: ExpertLora, held: range) -> ExpertLora:
    """The adapter of the experts that a rank has, numbered from its first."""
    here, weights = [place for place, expert in enumerate(lora.experts) if expert in held], lora.weights
    pieces = tuple(LoraPiece(p.start, p.stop, p.first, p.b_Or[here]) for p in weights.pieces)
    experts = tuple(lora.experts[place] - held.start for place in here)
    return ExpertLora(experts, LoraWeights(weights.a_RI[here], weights.scales_R, pieces))


class MixedExperts:
    """A mixture with adapters in slots, on some kernels. `held`: of a rank that has these experts."""

    def __init__(self, ops: Ops, dtype: torch.dtype, routing: Routing, held: range = range(COUNT)) -> None:
        assert ops.lora is not None
        self.ops = ops
        torch.manual_seed(0)
        gate_ups = [torch.randn(2 * INNER, HIDDEN) / HIDDEN**0.5 for _ in range(COUNT)]
        downs = [torch.randn(HIDDEN, INNER) / INNER**0.5 for _ in range(COUNT)]
        here = slice(held.start, held.stop)
        packed = [self._packed([weight.to(dtype) for weight in many[here]]) for many in (gate_ups, downs)]
        self.mixture = Mixture(packed[0], packed[1], COUNT, 3, True, routing, held=held)
        self.sites = LoraSite(), LoraSite()
        sizes = (HIDDEN, 2 * INNER), (INNER, HIDDEN)
        for slot, experts in SOME.items():
            for site, (inputs, outputs) in zip(self.sites, sizes, strict=True):
                many = [
                    expert_lora(experts[:1], 2, inputs, outputs, slot),
                    expert_lora(experts[1:], 9, inputs, outputs, slot + 1),
                ]
                mine = [of_rank(in_dtype(lora, dtype), held) for lora in many if lora.experts]
                ops.lora.load_experts(site, slot, len(held), [lora for lora in mine if lora.experts])

    def _packed(self, weights: list[Tensor]) -> list[object]:
        if self.ops.pack_experts is not None:
            return [self.ops.pack_experts(torch.cat(weights), None)]
        return [self.ops.pack_linear(weight, None) for weight in weights]

    def _rows_of(self, slots: list[int]) -> AdaptedRows:
        runs = [(slot, range(row, row + 1)) for row, slot in enumerate(slots)]
        assert self.ops.lora is not None
        if self.ops.lora.takes_tiles:
            tiles = torch.tensor(LoraTiles.numbers(runs), dtype=torch.int32)
            return LoraTiles(tiles.view(-1, 1 + TILE_ROWS))
        rows = LoraRows.of(runs)
        assert rows is not None
        return rows

    def __call__(self, x: Tensor, logits: Tensor, slots: list[int]) -> Tensor:
        if all(slot < 0 for slot in slots):
            return self.ops.experts(self.mixture, x, logits).clone()
        adapters = ExpertAdapters(*self.sites, self._rows_of(slots))
        return self.ops.experts(self.mixture, x, logits, None, None, adapters).clone()
