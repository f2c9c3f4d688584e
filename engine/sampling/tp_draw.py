"""Sampling from logits sharded over ranks, without gathering whole rows.

Probabilities are integers (`integer_softmax.py`), so sums over shards equal the sum over the whole
vocabulary, and the sampled id is bit by bit that of a single rank. All ranks of the stage call the same
function with the same rows and get the same result.

R rows, t ranks, V this rank's vocabulary shard, K candidates.
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
    """Sampling methods over sharded rows [R, V]."""

    def __init__(self, collective: Communicator, part: ShardSlice) -> None:
        self._collective = collective
        self._part = part

    def greedy(self, logits_RV: Tensor) -> SampledRows:
        best_R, id_R = best_of(logits_RV)
        best_tR2 = self._collective.gather(torch.stack([best_R.double(), id_R.double()], 1))
        # Ranks are in the order of their ids: ties go to the first rank, so to the lowest id.
        best_R, rank_R = torch.max(best_tR2[..., 0].T, dim=1)
        local_R = best_tR2[..., 1].long().gather(0, rank_R[None])[0]
        return SampledRows(
            local_R + rank_R * self._part.size, best_R, torch.ones_like(rank_R, dtype=torch.bool)
        )

    def whole(self, logits_RV: Tensor, knobs: SamplingTensors) -> SampledRows:
        """Sample with temperature and min-p, as `draw_whole`."""
        best_R = self.best(logits_RV)
        until_RV = weights_above(logits_RV, best_R[:, None], knobs).cumsum(-1)
        return self.by_weights(Cumulative(until_RV), best_R, knobs.noise)

    def by_weights(self, part: PartWeights, best_R: Tensor, noise_R: Tensor) -> SampledRows:
        """Sample from sharded weights: the rank whose weights contain the point finds the id."""
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
        """Sample with top-k and top-p, as `draw_ranked`, from the `size` best ids of each rank."""
        value_RK, id_RK, _ = ranked(logits_RV, size)
        values_R, ids_R = (
            self._collective.gather(each).transpose(0, 1).flatten(1)
            for each in (value_RK, id_RK + self._part.start)
        )
        value_RK, order_RK = torch.sort(values_R, dim=-1, descending=True, stable=True)
        value_RK, order_RK = value_RK[:, :size], order_RK[:, :size]
        # Values above the last one are complete: no rank withholds anything larger than its own last.
        certain_R = (value_RK > value_RK[:, -1:]).sum(-1)
        total_R = None
        if not cuts_k:
            mine_R = weights_above(logits_RV, value_RK[:, :1], knobs).sum(-1)
            total_R = self._collective.gather(mine_R).sum(0)
        return draw_among(value_RK, ids_R.gather(1, order_RK), certain_R, knobs, total_R)

    def best(self, logits_RV: Tensor) -> Tensor:
        """Return the largest logit over all ranks, float32 [R]; NaN where a row has one."""
        return self._collective.gather(logits_RV.amax(-1).float()).amax(0)


class Cumulative(NamedTuple):
    """`PartWeights` in plain torch: cumulative weights of this rank's shard."""

    until_RV: Tensor

    @property
    def total_R(self) -> Tensor:  # noqa: N802
        return self.until_RV[:, -1]

    def columns(self, point_R: Tensor) -> Tensor:
        return invert(self.until_RV, point_R)
