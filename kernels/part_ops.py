"""Operations on rows of logits that lie in parts on several ranks. Optional: `Ops.parts`.

R rows, V this rank's part of the vocabulary, K candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .rows import RuleRows, SampleRows


class PartWeights(Protocol):
    """What ids of a part weigh, whose weights are those of `engine/sampler/weights.py`."""

    @property
    def total_R(self) -> Tensor:  # noqa: N802
        """int64."""
        ...

    def columns(self, point_R: Tensor) -> Tensor:
        """Where the sum of weights first exceeds the point, int64; any column where it does not."""
        ...


@dataclass(frozen=True, slots=True)
class PartOps:
    count: Callable[[Tensor, RuleRows], None]
    """(position_S, rules): counts each row's last token, unless it was at this position before."""

    candidates: Callable[[Tensor, SampleRows, int, int], Tensor]
    """(logits_RV, rows, K, first id): the best of each row, one where it is greedy, otherwise as many as
    top-k keeps, at most K, in the order of ids; minus infinity after them. int64 [R, K]: bits of the float32
    logit, then 32 bits of the id. A row with NaN or infinity has that first."""

    weigh: Callable[[Tensor, Tensor, SampleRows], PartWeights]
    """(logits_RV, best_R float32 of all parts, rows): at each row's temperature, 0 where min-p cuts."""

    noise: Callable[[SampleRows], Tensor]
    """float64 [R]: `engine.noise.uniform` of seed and position."""
