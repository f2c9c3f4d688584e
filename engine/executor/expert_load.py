"""Load of a mixture's experts: how unevenly rows chose them, and where copies of hot ones are placed for it.

Counts are kept in a file of the model and serve its next load; `expert_moves.py` follows them until then. No
placement changes a token: `Ops.combine_experts` adds up results in one order, whichever rank computed them.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from llmbox.kernels.op_types import Mixture

from ..model_config.moe import ExpertsConfig
from ..model_config.parallel_layout import ExpertPlacement, ParallelLayout
from ..planning.memory_plan import MemoryPlan
from ..weights.packed_cache.cache import read_cache_variables

if TYPE_CHECKING:
    from .expert_moves import ExpertBalancer

log = logging.getLogger("llmbox.engine")

READ_SECONDS: Final = 1.0
"""Seconds for which a reading of the counters serves: statistics are sent with each step."""
SAVE_SECONDS: Final = 60.0
"""Seconds between two writes of the counts."""
WORTH_IT: Final = 1.1
"""Imbalance of the placement before over that of a new one, from which on experts are placed anew: their
weights have to be packed again."""
MAX_FILE: Final = 16 << 20
MAX_ROWS: Final = 1 << 60


class ExpertStats(TypedDict, total=False):
    """Fields of `EngineStats` about experts."""

    expert_rows: int
    expert_imbalance: float
    expert_rank_imbalance: float
    expert_rank_imbalance_without_copies: float
    expert_moves: int


class LoadHistory:
    """File with the rows that chose each expert of each layer, and the last placement."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @classmethod
    def of_model(cls, directory: Path) -> "LoadHistory | None":
        """Return the history of a model, beside its packed weights; None: nothing is kept on disk."""
        place = read_cache_variables()
        if place is None:
            return None
        digest = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()
        return cls(place[0] / f"experts-{digest[:32]}.json")

    def counts(self, layers: int, experts: int) -> list[list[int]]:
        """Return the rows of each expert, [layer][expert]; zeros where nothing fitting is kept."""
        found = _table(self._read().get("rows"), layers, experts)
        if all(type(rows) is int and 0 <= rows < MAX_ROWS for load in found for rows in load) and found:
            return found
        return [[0] * experts for _ in range(layers)]

    def placement(self, layers: int, experts: int, ranks: int, redundant: int) -> ExpertPlacement:
        """Return the last placement if it is one of these sizes; else an empty one."""
        found = _table(self._read().get("placement"), layers, experts)
        placement = tuple(tuple(map(_ranks_of, layer)) for layer in found)
        return placement if all(_is_placed(layer, ranks, redundant) for layer in placement) else ()

    def save(self, rows: Sequence[Sequence[int]] | None = None, placement: ExpertPlacement = ()) -> None:
        """Keep these counts, this placement, or both, and what the file has of the other."""
        kept = self._read()
        kept |= {} if rows is None else {"rows": rows}
        kept |= {"placement": placement} if placement else {}
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(part, flags, 0o600), "w") as out:  # noqa: PTH123 - a descriptor
                json.dump(kept, out)
            part.replace(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            log.warning("the load of experts is not saved in %s: %s", self._file, error.strerror)

    def _read(self) -> dict[str, Any]:
        try:
            with self._file.open("rb") as stream:
                found = json.loads(stream.read(MAX_FILE))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("the load of experts in %s is ignored: %s", self._file, error)
            return {}
        return found if isinstance(found, dict) else {}


def _table(found: Any, layers: int, experts: int) -> list[list[Any]]:
    """Return the value if it is a list of lists of these sizes; else an empty list."""
    is_table = isinstance(found, list) and len(found) == layers
    if is_table and all(isinstance(layer, list) and len(layer) == experts for layer in found):
        return list(found)
    return []


def _ranks_of(found: Any) -> tuple[int, ...]:
    is_ranks = isinstance(found, list) and all(type(rank) is int for rank in found)
    return tuple(found) if is_ranks else ()


def _is_placed(layer: Sequence[tuple[int, ...]], ranks: int, redundant: int) -> bool:
    """Return whether each expert is somewhere, and each rank has its share of all copies."""
    held = [sum(rank in holders for holders in layer) for rank in range(ranks)]
    return all(
        holders and holders == tuple(sorted(set(holders) & set(range(ranks)))) for holders in layer
    ) and sorted(held, reverse=True) == _slots(len(layer), ranks, redundant)


class ExpertLoad:
    """Statistics of the counters that the layers of this rank have."""

    def __init__(
        self,
        mixtures: Sequence[Mixture],
        layout: ParallelLayout,
        clock: Callable[[], float] = time.monotonic,
        history: LoadHistory | None = None,
        balancer: "ExpertBalancer | None" = None,
    ) -> None:
        """`mixtures`: of each layer with experts, of which some have counters. These are set to 0, as steps
        before the first request do not count. `history` gets the counts. `balancer`: of a model with copies.
        """
        counted = [mixture for mixture in mixtures if mixture.load_X is not None]
        self._loads = [mixture.load_X for mixture in counted if mixture.load_X is not None]
        owners = [mixture.owners for mixture in counted if mixture.owners is not None]
        self._rank_loads = [each.load_R for each in owners if each.load_R is not None]
        self._clock = clock
        self._read_at = -math.inf
        self._saved_at = clock()
        self._stats = ExpertStats()
        self._history = history
        self._balancer, self._moved = balancer, 0
        layers, count = len(counted), counted[0].count
        self._without_copies = [replace(layout, placement=()).holders(count)] * layers
        earlier = [] if history is None else history.counts(layers, count)
        self._earlier = [[rows // 2 for rows in load] for load in earlier]
        for counter in (*self._loads, *self._rank_loads):
            counter.zero_()
        self._before = [counter.clone() for counter in (*self._loads, *self._rank_loads)]
        """Counts when experts last moved."""

    def balance(self) -> bool:
        return self._balancer is not None and self._balancer.advance()

    def stats(self) -> ExpertStats:
        now = self._clock()
        if now - self._read_at >= READ_SECONDS:
            self._read_at, self._stats = now, self._read()
        if now - self._saved_at >= SAVE_SECONDS:
            self._saved_at = now
            self.save()
        return self._stats

    def save(self) -> None:
        """Keep the rows counted since the engine started, and half of those before."""
        if self._history is None or not any(load_X.any() for load_X in self._loads):
            return
        pairs = zip(self._loads, self._earlier, strict=True)
        self._history.save(
            [[new + old for new, old in zip(load_X.tolist(), load, strict=True)] for load_X, load in pairs]
        )

    def _read(self) -> ExpertStats:
        layers: list[list[int]] = [load_X.tolist() for load_X in self._loads]
        found = ExpertStats(expert_rows=sum(map(sum, layers)), expert_imbalance=mean_imbalance(layers))
        if self._rank_loads:
            counters = (*self._loads, *self._rank_loads)
            if self._balancer is not None:
                found["expert_moves"] = self._balancer.moved
                if self._balancer.moved > self._moved:
                    self._moved = self._balancer.moved
                    self._before = [counter.clone() for counter in counters]
            since = [(now - then).tolist() for now, then in zip(counters, self._before, strict=True)]
            of_experts, of_ranks = since[: len(layers)], since[len(layers) :]
            found["expert_rank_imbalance"] = mean_imbalance(of_ranks)
            alone = placed_imbalance(self._without_copies, of_experts, len(self._rank_loads[0]))
            found["expert_rank_imbalance_without_copies"] = alone
        return found


def place_hot_experts(plan: MemoryPlan, experts: ExpertsConfig | None, directory: Path) -> MemoryPlan:
    """Return the plan with a placement of `plan.redundant_experts` copies a layer, by the rows of earlier
    loads. The last placement stays where a new one would be hardly better.
    """
    redundant, ranks = plan.redundant_experts, plan.tp
    if not redundant:
        return plan
    assert experts is not None
    layers, count = experts.num_layers, experts.count
    history = LoadHistory.of_model(directory)
    loads = [[0] * count for _ in range(layers)] if history is None else history.counts(layers, count)
    placement = place_experts(loads, ranks, redundant)
    if history is not None:
        last, rows = history.placement(layers, count, ranks, redundant), sum(map(sum, loads))
        found = placed_imbalance(placement, loads, ranks)
        if last and (not rows or placed_imbalance(last, loads, ranks) <= WORTH_IT * found):
            placement = last
        history.save(placement=placement)
    note = f"{redundant} copies of hot experts in each layer: "
    if any(map(any, loads)):
        alone = ParallelLayout(ranks, 1, expert_parallel=True).holders(count)
        before = placed_imbalance([alone] * layers, loads, ranks)
        after = placed_imbalance(placement, loads, ranks)
        note += (
            f"placed by {sum(map(sum, loads)):,} rows counted before, of which the busiest rank would have "
            f"{after:.2f} of the mean, without copies {before:.2f}"
        )
    else:
        note += "nothing was counted yet, so the first experts have them until the next load"
    return replace(plan, expert_placement=placement, notes=(*plan.notes, note))


def place_experts(loads: Sequence[Sequence[int]], ranks: int, redundant: int) -> ExpertPlacement:
    """Place the experts of each layer and `redundant` copies more on ranks. `loads`: rows of each expert."""
    return tuple(_place_layer(load, ranks, redundant) for load in loads)


@dataclass(slots=True)
class _RankSlots:
    """Slots of one rank that are free, and the rows that it has so far."""

    rank: int
    free: int
    rows: float = 0.0


def _place_layer(load: Sequence[int], ranks: int, redundant: int) -> tuple[tuple[int, ...], ...]:
    """Copy the experts of `count_copies`. Then deal out experts, those with most rows a
    copy first, to ranks with most free slots, of these to those with fewest rows: that always comes out even.
    """
    copies = count_copies(load, ranks, redundant)
    rows = [(load[expert] + 1) / copies[expert] for expert in range(len(load))]
    slots = [_RankSlots(rank, free) for rank, free in enumerate(_slots(len(load), ranks, redundant))]
    placed: list[tuple[int, ...]] = [()] * len(load)
    for expert in sorted(range(len(load)), key=lambda expert: (-rows[expert], expert)):
        slots.sort(key=lambda each: (-each.free, each.rows, each.rank))
        chosen = slots[: copies[expert]]
        for each in chosen:
            each.free -= 1
            each.rows += rows[expert]
        placed[expert] = tuple(sorted(each.rank for each in chosen))
    return tuple(placed)


def count_copies(load: Sequence[int], ranks: int, redundant: int) -> list[int]:
    """Return the copies of each expert: the one with most rows a copy gets one more, again and again."""
    copies = [1] * len(load)
    for _ in range(redundant):
        most = max(
            (expert for expert in range(len(load)) if copies[expert] < ranks),
            key=lambda expert: ((load[expert] + 1) / copies[expert], -expert),
        )
        copies[most] += 1
    return copies


def _slots(experts: int, ranks: int, redundant: int) -> list[int]:
    """Return the number of experts that each rank has of a layer, copies included."""
    size, more = divmod(experts + redundant, ranks)
    return [size + (rank < more) for rank in range(ranks)]


def placed_imbalance(placement: ExpertPlacement, loads: Sequence[Sequence[int]], ranks: int) -> float:
    """Return `mean_imbalance` of the ranks if copies of an expert get equal shares of its rows."""
    layers = []
    for layer, load in zip(placement, loads, strict=True):
        shares = [0.0] * ranks
        for holders, rows in zip(layer, load, strict=True):
            for rank in holders:
                shares[rank] += rows / len(holders)
        layers.append(shares)
    return mean_imbalance(layers)


def mean_imbalance(layers: Sequence[Sequence[float]]) -> float:
    """Return the largest share of a layer over the mean share, as the mean of the layers with rows; 0 if none
    has any.
    """
    found = [max(load) * len(load) / sum(load) for load in layers if any(load)]
    return sum(found) / len(found) if found else 0.0
