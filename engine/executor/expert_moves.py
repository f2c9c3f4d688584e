"""Copies of hot experts that follow the load of a running engine.

Rank 0 measures how unevenly ranks are loaded, and moves single experts between two steps. The weights of the
moved expert overwrite those of another one on the target rank: a copy that is no longer needed, or an expert
that moves the other way. After each move every expert is on some rank, so a step may follow. Tokens do not
change: see `expert_load.py`.
"""

import hashlib
import logging
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from llmbox.kernels.op_types import ExpertOwners, Mixture

from ..model_config.parallel_layout import ExpertPlacement, ParallelLayout
from ..runner.cpu_runner import CPUModelRunner
from ..weights.packed_cache.source import is_writing
from .expert_load import WORTH_IT, ExpertLoad, LoadHistory, count_copies, placed_imbalance

log = logging.getLogger("llmbox.engine")

CHECK_SECONDS: Final = 30.0
"""Seconds for which rows are counted before experts move by them."""
LONGEST_CHECK: Final = 16 * CHECK_SECONDS
"""The same after several times at which no move was worth it."""
ROWS_OF_EXPERT: Final = 100
"""Rows an expert, in the mean, without which a count says nothing."""
EXCHANGES: Final = 16
"""Most exchanges of a layer at once: a step waits for their search."""


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """Move of an expert to the place of another, which leaves that rank, or goes back to the source."""

    layer: int
    expert: int
    source: int
    destination: int
    """TP ranks."""
    replaced: int
    is_exchange: bool

    def apply(self, holders: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the ranks that hold each expert of the layer after the move."""
        moved = list(holders)
        there, back = {self.destination}, {self.source} if self.is_exchange else set()
        moved[self.expert] = tuple(sorted({*holders[self.expert]} - back | there))
        moved[self.replaced] = tuple(sorted({*holders[self.replaced]} - there | back))
        return moved


class ExpertMover:
    """One rank's part of moves: its linears, and the tables of who holds what."""

    def __init__(self, runner: CPUModelRunner) -> None:
        model = runner.model
        self._rank, self._ops, self._adapters = model.rank, model.ops, model.adapters
        self._mixtures = model.mixtures
        self._number: int | None = None
        """Digest of the formats, once it was asked for."""
        self._buffers: list[Tensor] = []
        """Memory of one expert, on its way to this rank."""

    def execute(self, command: dict[str, Any]) -> bool:
        """Execute a command of rank 0, as all ranks do: a move, or without one the question whether experts
        can be moved.
        """
        if not command:
            return self._can_move()
        self._move(ExpertMove(**command))
        return True

    def _can_move(self) -> bool:
        """Return whether a layer's experts have one format on all ranks, and no rank writes them to disk."""
        if self._number is None:
            self._number = self._number_of_forms()
        mine = torch.tensor([self._number, is_writing()])
        numbers = self._rank.communicator.all_gather(mine).tolist()
        return self._number >= 0 and all(each == [self._number, 0] for each in numbers)

    def _number_of_forms(self) -> int:
        """Return a digest of the formats of all layers; -1 where weights cannot be moved."""
        if self._ops.weight_memory is None:
            return -1
        try:
            self._memory(self._mixtures[0], 0)
        except OSError as error:
            log.warning("experts stay where they are: %s", error)
            return -1
        forms = repr([self._form(mixture) for mixture in self._mixtures]).encode()
        return int.from_bytes(hashlib.sha256(forms).digest()[:7], "little")

    def _form(self, mixture: Mixture) -> list[Any]:
        """Return the format that all experts of a layer have in common. If they differ, return a value that
        no other rank returns, so that the comparison of ranks fails.
        """
        pairs = zip(mixture.gate_ups, mixture.downs, strict=True)
        forms = {tuple(map(self._form_of, pair)) for pair in pairs}
        return [*forms] if len(forms) == 1 else [self._rank.layout.tp_rank]

    def _form_of(self, packed: Any) -> tuple[Any, ...]:
        packing = self._ops.packing
        if packing is None:
            return tuple(map(len, self._memory_of(packed)))
        return packing.format_name(packed), packed.outputs, packed.inputs

    def _memory_of(self, packed: Any) -> list[Tensor]:
        assert self._ops.weight_memory is not None
        return self._ops.weight_memory(packed)

    def _move(self, move: ExpertMove) -> None:
        mixture, mine = self._mixtures[move.layer], self._rank.layout.tp_rank
        assert mixture.owners is not None
        held = list(mixture.here)
        if mine == move.source:
            place = held.index(move.expert)
            memory = self._memory(mixture, place)
            self._transfer(memory, move.source, move.destination)
            if move.is_exchange:
                self._transfer(memory, move.destination, move.source)
                held[place] = move.replaced
        elif mine == move.destination:
            place = held.index(move.replaced)
            memory = self._memory(mixture, place)
            if not move.is_exchange:
                self._transfer(memory, move.source, move.destination)
            else:
                if list(map(len, self._buffers)) != list(map(len, memory)):
                    self._buffers = list(map(torch.empty_like, memory))
                self._transfer(self._buffers, move.source, move.destination)
                self._transfer(memory, move.destination, move.source)
                for place_of, arrived in zip(memory, self._buffers, strict=True):
                    place_of.copy_(arrived)
            held[place] = move.expert
        mixture.place(held, move.apply(mixture.owners.holders))
        if self._adapters is not None:
            self._adapters.rename_experts(mixture)

    def _memory(self, mixture: Mixture, place: int) -> list[Tensor]:
        return [*self._memory_of(mixture.gate_ups[place]), *self._memory_of(mixture.downs[place])]

    def _transfer(self, memory: Sequence[Tensor], source: int, destination: int) -> None:
        for each in memory:
            self._rank.communicator.transfer(each, source, destination)


class ExpertBalancer:
    """Rank 0's part: measures, and decides on moves. One of them, or the search in one layer, goes before a
    step.
    """

    def __init__(self, runner: CPUModelRunner, run_everywhere: Callable[[dict[str, Any]], bool]) -> None:
        """`run_everywhere`: has all ranks execute a command, and returns what rank 0 answers."""
        self._runner = runner
        self._layers: list[tuple[Tensor, ExpertOwners]] = [
            (mixture.load_X, mixture.owners)
            for mixture in runner.model.mixtures
            if mixture.load_X is not None and mixture.owners is not None
        ]
        self._run = run_everywhere
        self._wait = CHECK_SECONDS
        self._check_at = time.monotonic() + CHECK_SECONDS
        self._counted = self._counts()
        self._moves: Iterator[ExpertMove | None] | None = None
        self.moved = 0
        """Experts that went to another rank."""

    def advance(self) -> bool:
        """Make one move, or search in one layer. False: there is nothing to do now."""
        if self._moves is None:
            self._begin()
        if self._moves is None:
            return False
        if self._runner.adapters:  # an adapter's weights of experts lie where these were at its load
            self._moves = None
            return False
        for move in self._moves:
            if move is not None:
                self._run(asdict(move))
                self.moved += 1 + move.is_exchange
            return True
        self._moves = None
        return False

    def _counts(self) -> list[list[int]]:
        return [load_X.tolist() for load_X, _ in self._layers]

    def _holders(self) -> ExpertPlacement:
        return [owners.holders for _, owners in self._layers]

    def _begin(self) -> None:
        """Look at the rows since the last time, if there are enough, and begin to move if it helps."""
        now = time.monotonic()
        if now < self._check_at or self._runner.adapters:
            return
        counts = self._counts()
        pairs = zip(counts, self._counted, strict=True)
        loads = [[new - old for new, old in zip(*layer, strict=True)] for layer in pairs]
        if any(sum(load) < ROWS_OF_EXPERT * len(load) for load in loads):
            self._check_at = now + CHECK_SECONDS
            return
        self._wait = min(2 * self._wait, LONGEST_CHECK)
        self._check_at, self._counted = now + self._wait, counts
        ranks = self._layers[0][1].ranks
        if placed_imbalance(self._holders(), loads, ranks) > WORTH_IT and self._run({}):
            self._moves = self._search(loads, ranks)

    def _search(self, loads: list[list[int]], ranks: int) -> Iterator[ExpertMove | None]:
        """Yield the moves, and None after the search in a layer."""
        before, moved = placed_imbalance(self._holders(), loads, ranks), self.moved
        for number, (load, (_, owners)) in enumerate(zip(loads, self._layers, strict=True)):
            moves = balance_layer(number, load, owners.holders, ranks)
            holders: Sequence[Sequence[int]] = owners.holders
            for move in moves:
                holders = move.apply(holders)
            yield None
            if placed_imbalance([owners.holders], [load], ranks) > WORTH_IT * placed_imbalance(
                [holders], [load], ranks
            ):
                yield from moves
        if self.moved > moved:
            self._wait = CHECK_SECONDS
            self._check_at = time.monotonic() + CHECK_SECONDS
            self._counted = self._counts()
            after = placed_imbalance(self._holders(), loads, ranks)
            log.info(
                "%d experts went to another rank: by the rows of the time before, the busiest rank would "
                "have %.2f of the mean, before %.2f",
                self.moved - moved,
                after,
                before,
            )


def balance_layer(
    layer: int, load: Sequence[int], holders: Sequence[Sequence[int]], ranks: int
) -> list[ExpertMove]:
    """Return moves that bring a layer's copies to the experts with most rows, and then even the ranks out.
    `load`: rows of each expert.
    """
    moves: list[ExpertMove] = []
    wanted = count_copies(load, ranks, sum(map(len, holders)) - len(load))
    for expert in sorted(range(len(load)), key=lambda expert: -load[expert]):
        while len(holders[expert]) < wanted[expert]:
            totals = _totals(load, holders, ranks)
            places = [
                (totals[rank], load[other], rank, other)
                for other in range(len(load))
                if len(holders[other]) > wanted[other]
                for rank in holders[other]
                if rank not in holders[expert]
            ]
            if not places:
                break
            *_, rank, other = min(places)
            moves.append(ExpertMove(layer, expert, holders[expert][0], rank, other, is_exchange=False))
            holders = moves[-1].apply(holders)
    for _ in range(EXCHANGES):
        move = _exchange(layer, load, holders, ranks)
        if move is None:
            break
        moves.append(move)
        holders = move.apply(holders)
    return moves


def _totals(load: Sequence[int], holders: Sequence[Sequence[int]], ranks: int) -> list[float]:
    """Return the rows that each rank computes if the copies of an expert share its rows equally."""
    totals = [0.0] * ranks
    for rows, held in zip(load, holders, strict=True):
        for rank in held:
            totals[rank] += rows / len(held)
    return totals


def _exchange(
    layer: int, load: Sequence[int], holders: Sequence[Sequence[int]], ranks: int
) -> ExpertMove | None:
    """Return the exchange between the busiest and the idlest rank that evens them out most; None: none helps
    by a hundredth of the mean.
    """
    totals = _totals(load, holders, ranks)
    busy, idle = totals.index(max(totals)), totals.index(min(totals))
    wanted = (totals[busy] - totals[idle]) / 2

    def alone_on(rank: int, other: int) -> list[tuple[float, int]]:
        found = ((load[expert] / len(held), expert) for expert, held in enumerate(holders) if rank in held)
        return sorted(each for each in found if other not in holders[each[1]])

    theirs, best = alone_on(idle, busy), (wanted, -1, -1)
    for rows, expert in alone_on(busy, idle):
        place = bisect(theirs, (rows - wanted, -1))
        for less, other in theirs[max(0, place - 1) : place + 1]:
            best = min(best, (abs(wanted - (rows - less)), expert, other))
    gap, expert, other = best
    if wanted - gap <= sum(totals) / ranks / 100:
        return None
    return ExpertMove(layer, expert, busy, idle, other, is_exchange=True)


def count_experts(
    runner: object,
    layout: ParallelLayout,
    directory: Path,
    run_everywhere: Callable[[dict[str, Any]], bool] | None = None,
) -> ExpertLoad | None:
    """Return rank 0's counters of the rows that chose each expert of its pipeline stage; None for a model
    without experts and on GPUs, where nothing is counted. `run_everywhere`: see `ExpertBalancer`.
    """
    mixtures = runner.model.mixtures if isinstance(runner, CPUModelRunner) else []
    if not any(mixture.load_X is not None for mixture in mixtures):
        return None
    history = LoadHistory.of_model(directory) if layout.pp == 1 else None
    balancer = None
    if layout.placement and run_everywhere is not None:
        assert isinstance(runner, CPUModelRunner)
        balancer = ExpertBalancer(runner, run_everywhere)
    return ExpertLoad(mixtures, layout, history=history, balancer=balancer)
