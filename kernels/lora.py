"""Operations of LoRA adapters: y += scale B (A x) for the rows of each adapter of a step.

T rows of the step, I inputs and O outputs of a linear, R ranks of all adapted parts of a stacked linear.
An adapter in memory has a slot, the same at every linear.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Chen et al., "Punica: Multi-Tenant LoRA
Serving", 2023.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MAX_SLOTS = 64
"""Adapters that are in memory at once."""
TILE_ROWS = 16
"""Rows of a tile of `LoraTiles`."""


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows of a step that have an adapter, one run of `rows` for each; int32 tensors on the host."""

    rows: Tensor
    """Numbers of rows, those of one adapter next to each other."""
    starts: Tensor
    """First entry in `rows` of each run, and the end of the last one."""
    slots: Tensor
    """Slot of each run."""

    @classmethod
    def of(cls, slots_T: Iterable[tuple[int, range]]) -> "LoraRows | None":
        """Group (slot, rows) by slot; a negative slot is none. None where no row has one."""
        by_slot = _group(slots_T)
        if not by_slot:
            return None
        order, starts = array("i"), array("i", [0])
        for slot in sorted(by_slot):
            order.extend(by_slot[slot])
            starts.append(len(order))
        return cls(*(torch.tensor(each, dtype=torch.int32) for each in (order, starts, sorted(by_slot))))

    def runs(self) -> list[tuple[int, Tensor]]:
        """Return slot and row numbers of each run, for indexing."""
        bounds = self.starts.tolist()
        each = zip(self.slots.tolist(), bounds, bounds[1:], strict=False)
        return [(slot, self.rows[start:stop].long()) for slot, start, stop in each]


@dataclass(frozen=True, slots=True)
class LoraTiles:
    """The same rows on a GPU, as tiles of one adapter each. Only their number decides the launches."""

    tiles: Tensor
    """int32 [tiles, 1 + TILE_ROWS]: slot and rows. A slot of -1 is not a tile, a row of -1 not a row."""
    host: "array[int] | None" = None
    """The same numbers, where they do not change."""

    @staticmethod
    def numbers(slots_T: Iterable[tuple[int, range]]) -> "array[int]":
        """Return the tiles of (slot, rows), one after another; a negative slot is none."""
        by_slot, tiles = _group(slots_T), array("i")
        for slot in sorted(by_slot):
            rows = by_slot[slot]
            for start in range(0, len(rows), TILE_ROWS):
                part = rows[start : start + TILE_ROWS]
                tiles.append(slot)
                tiles.extend(part)
                tiles.extend([-1] * (TILE_ROWS - len(part)))
        return tiles

    @staticmethod
    def most(rows: int) -> int:
        """Return the maximum number of tiles for so many rows."""
        return min(rows, MAX_SLOTS + rows // TILE_ROWS)

    def runs(self) -> list[tuple[int, Tensor]]:
        """Return slot and row numbers of each tile, for indexing."""
        numbers = self.tiles.flatten().tolist() if self.host is None else self.host
        runs = []
        for number, tile in enumerate(self.tiles):
            slot, *rows = numbers[number * len(tile) : (number + 1) * len(tile)]
            count = sum(row >= 0 for row in rows)
            if slot >= 0:
                runs.append((slot, tile[1 : 1 + count].long()))
        return runs


def _group(slots_T: Iterable[tuple[int, range]]) -> "dict[int, array[int]]":
    by_slot: dict[int, array[int]] = {}
    for slot, rows in slots_T:
        if slot >= 0:
            by_slot.setdefault(slot, array("i")).extend(rows)
    return by_slot


AdaptedRows = LoraRows | LoraTiles


@dataclass(frozen=True, slots=True)
class LoraPiece:
    """Outputs `start .. stop` of a linear, which read ranks `first .. first + B's columns`."""

    start: int
    stop: int
    first: int
    b_Or: Tensor


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Weights of one adapter for one linear, with the scale of each rank in float32."""

    a_RI: Tensor
    scales_R: Tensor
    pieces: tuple[LoraPiece, ...]
    packed: Any = None
    """Form that the backend made of them."""


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """Weights of one adapter for some experts of a layer, whose ranks and scales are the same: A and B have a
    first dimension of these experts.
    """

    experts: tuple[int, ...]
    weights: LoraWeights


@dataclass(slots=True)
class LoraSite:
    """One linear or embedding, and the weights that adapters in memory add to it or replace it by."""

    weights: dict[int, LoraWeights] = field(default_factory=dict)
    """Weights by slot."""
    tables: dict[int, Tensor] = field(default_factory=dict)
    """Whole embeddings [V, E] in place of the model's, by slot."""
    experts: dict[int, Any] = field(default_factory=dict)
    """Weights of a layer's experts by slot, in the backend's form."""
    addresses: "array[int]" = field(default_factory=lambda: array("q", bytes(8 * MAX_SLOTS)))
    """Addresses by slot that C++ kernels read: of packed weights, or of a table; 0: none."""
    on_device: Tensor | None = None
    """The same addresses as Triton kernels read them, one for each expert of a slot where there are experts;
    None until an adapter has something here.
    """
    ranks: int = 0
    """Ranks that launches of Triton kernels are made for; never fewer than before."""


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Adapters of a layer's experts in a step, for `Ops.experts`: their results are added to those of each
    expert's linears, in float32 and rounded once.
    """

    gate_ups: LoraSite
    downs: LoraSite
    rows: AdaptedRows


@dataclass(frozen=True, slots=True)
class LoraOps:
    """Operations of adapters. A row's bits do not depend on the rows and the adapters beside it."""

    load: Callable[[LoraSite, int, LoraWeights], None]
    """(site, slot, weights in the model's dtype, contiguous): use them from the next step on."""

    load_table: Callable[[LoraSite, int, Tensor], None]
    """(site, slot, table_VE) as `load`, in place of an embedding."""

    unload: Callable[[LoraSite, int], None]
    """(site, slot): forget what is there, if anything."""

    add: Callable[[LoraSite, Tensor, Tensor, Any], None]
    """(site, x_TI, y_TO, rows): add to y in place, in float32 and rounded once. y has the dtype of x or
    float32; rows of both may be strided."""

    embed: Callable[[LoraSite, Tensor, Tensor, float, Any], None]
    """(site, ids_T, x_TE, scale, rows): write embeddings of adapters that have a table, scaled."""

    load_experts: Callable[[LoraSite, int, int, Sequence[ExpertLora]], None]
    """(site, slot, number of experts, weights) as `load`, for `Ops.experts`."""

    takes_tiles: bool = False
    """`rows` of the two above are `LoraTiles`, not `LoraRows`: a runner on a GPU needs that."""

    device: torch.device | None = None
    """Device that weights of adapters lie on; None: the host."""

    reserve: Callable[[int, int], None] = lambda _slot, _nbytes: None
    """(slot, bytes): make room for an adapter, before it is loaded into the slot."""

    release: Callable[[int], None] = lambda _slot: None
    """(slot): free that room, once the slot is unloaded everywhere."""

    prepare: Callable[[int], None] = lambda _nbytes: None
    """(bytes): have room for an adapter of that size ready by its `reserve`. Returns at once."""

    is_int8: bool = False
    """True if A and B are kept in 8 bits: a scale for each rank of A, and of 64 outputs of B."""

    launches: Callable[[], int] = int
    """Number that changes when an adapter was loaded that graphs captured before cannot serve."""


def unload(site: LoraSite, slot: int) -> None:
    site.addresses[slot] = 0
    site.weights.pop(slot, None)
    site.tables.pop(slot, None)
    site.experts.pop(slot, None)
