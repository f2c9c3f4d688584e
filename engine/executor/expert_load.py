"""Balance of a mixture's experts: how unevenly rows chose them since the engine started."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, TypedDict

from torch import Tensor

from ..model_config.parallel_layout import ParallelLayout
from ..runner.cpu_runner import CPUModelRunner

READ_SECONDS: Final = 1.0
"""Seconds for which a reading of the counters serves: statistics are sent with each step."""


class ExpertStats(TypedDict, total=False):
    """Fields of `EngineStats` about experts."""

    expert_rows: int
    expert_imbalance: float
    expert_rank_imbalance: float


class ExpertLoad:
    """Statistics of the counters that the layers of this rank have (`Mixture.load_X`)."""

    def __init__(
        self,
        loads: Sequence[Tensor],
        ranks: Sequence[range] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`loads`: rows that chose each expert, of each layer with experts; set to 0, as steps before the
        first request do not count. `ranks`: experts of each rank that has some whole; empty: none has.
        """
        self._loads = loads
        self._ranks = ranks
        self._clock = clock
        self._read_at = -math.inf
        self._stats = ExpertStats()
        for load_X in loads:
            load_X.zero_()

    def stats(self) -> ExpertStats:
        now = self._clock()
        if now - self._read_at >= READ_SECONDS:
            self._read_at, self._stats = now, self._read()
        return self._stats

    def _read(self) -> ExpertStats:
        layers: list[list[int]] = [load_X.tolist() for load_X in self._loads]
        found = ExpertStats(expert_rows=sum(map(sum, layers)), expert_imbalance=mean_imbalance(layers))
        if self._ranks:
            shares = [[sum(load[held.start : held.stop]) for held in self._ranks] for load in layers]
            found["expert_rank_imbalance"] = mean_imbalance(shares)
        return found


def count_experts(runner: object, layout: ParallelLayout) -> Callable[[], ExpertStats]:
    """Return the statistics of rank 0's counters, which see the rows of its whole stage. A model without
    experts has none, nor has one on a GPU, where nobody counts.
    """
    loads = runner.expert_loads if isinstance(runner, CPUModelRunner) else []
    if not loads:
        return ExpertStats
    ranks = [replace(layout, rank=rank) for rank in range(layout.tp if layout.expert_parallel else 0)]
    return ExpertLoad(loads, [rank.experts(len(loads[0])) for rank in ranks]).stats


def mean_imbalance(layers: Sequence[Sequence[int]]) -> float:
    """Return the largest share of a layer over the mean share, as the mean of the layers with rows; 0 if none
    has any.
    """
    found = [max(load) * len(load) / sum(load) for load in layers if any(load)]
    return sum(found) / len(found) if found else 0.0
