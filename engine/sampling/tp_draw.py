"""Drawing a row whose logits are in parts on several ranks, without bringing them together.

Weights are integers (`sampling/integer_softmax.py`), so their sums over parts are the sums over the whole,
and what is drawn here is bit by bit what one rank would draw. All ranks of the stage call the same function
with the same rows, and come to the same result.

Legend: R rows, t ranks, V this rank's part of the vocabulary, K candidates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmbox.kernels.sampling_types import PartWeights

from ..distributed.communicator import Communicator
from ..partition import ShardSlice
from .draw import SampledRows, SamplingTensors, draw_among, invert, points, weights_above
from .topk import best_of, ranked


class TPDraw:
    def __init__(self, collective: Communicator, part: ShardSlice) -> None:
        self._collective = collective
        self._part = part

    def greedy(self, logits_RV: Tensor) -> SampledRows:
        best_R, id_R = best_of(logits_RV)
        best_tR2 = self._collective.gather(torch.stack([best_R.double(), id_R.double()], 1))
        # Ranks stand in the order of their ids: of equal logits the lowest id is the first.
        best_R, rank_R = torch.max(best_tR2[..., 0].T, dim=1)
        local_R = best_tR2[..., 1].long().gather(0, rank_R[None])[0]
        return SampledRows(
            local_R + rank_R * self._part.size, best_R, torch.ones_like(rank_R, dtype=torch.bool)
        )

    def whole(self, logits_RV: Tensor, knobs: SamplingTensors) -> SampledRows:
        """As `draw_whole`."""
        best_R = self.best(logits_RV)
        until_RV = weights_above(logits_RV, best_R[:, None], knobs).cumsum(-1)
        return self.by_weights(Cumulative(until_RV), best_R, knobs.noise)

    def by_weights(self, part: PartWeights, best_R: Tensor, noise_R: Tensor) -> SampledRows:
        """The rank whose weights the point falls into knows the id."""
        until_tR = self._collective.gather(part.total_R).cumsum(0)
        point_R = points(until_tR[-1], noise_R)
        rank_R = invert(until_tR.T.contiguous(), point_R)
        before_R = until_tR.gather(0, (rank_R - 1).clamp(min=0)[None])[0].where(rank_R > 0, 0)
        id_R = self._part.start + part.columns(point_R - before_R)
        found_R = self._collective.gather(id_R).gather(0, rank_R[None])[0]
        return SampledRows(found_R, best_R, torch.ones_like(found_R, dtype=torch.bool))

    def among_best(
        self, logits_RV: Tensor, knobs: SamplingTensors, size: int, *, cuts_k: bool
    ) -> SampledRows:
        """As `draw_ranked`: the best of all are among the `size` best of each rank."""
        value_RK, id_RK, _ = ranked(logits_RV, size)
        values_R, ids_R = (
            self._collective.gather(each).transpose(0, 1).flatten(1)
            for each in (value_RK, id_RK + self._part.start)
        )
        value_RK, order_RK = torch.sort(values_R, dim=-1, descending=True, stable=True)
        value_RK, order_RK = value_RK[:, :size], order_RK[:, :size]
        # What is larger than the last is complete: no rank keeps back anything larger than its own last.
        certain_R = (value_RK > value_RK[:, -1:]).sum(-1)
        total_R = None
        if not cuts_k:
            mine_R = weights_above(logits_RV, value_RK[:, :1], knobs).sum(-1)
            total_R = self._collective.gather(mine_R).sum(0)
        return draw_among(value_RK, ids_R.gather(1, order_RK), certain_R, knobs, total_R)

    def best(self, logits_RV: Tensor) -> Tensor:
        """[R], float32, over all ranks; NaN where one is anywhere."""
        return self._collective.gather(logits_RV.amax(-1).float()).amax(0)


class Cumulative(NamedTuple):
    """`PartWeights` in plain torch."""

    until_RV: Tensor

    @property
    def total_R(self) -> Tensor:  # noqa: N802
        return self.until_RV[:, -1]

    def columns(self, point_R: Tensor) -> Tensor:
        return invert(self.until_RV, point_R)
