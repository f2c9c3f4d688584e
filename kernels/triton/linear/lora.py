"""Operations of LoRA adapters on GPUs: two launches a linear, low = scale A x and y += B low (SGMV).

Programs take tiles of rows with one adapter (`LoraTiles`) and find its weights by addresses in device memory,
so a graph serves adapters that are loaded later. All sums are float32, in one order for each row: tiles have
one shape, and inputs are split by their number alone. A pair of adapter and expert is to them an adapter
(`fused_moe.py`).

Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...lora import MAX_SLOTS, TILE_ROWS, ExpertLora, LoraOps, LoraSite, LoraTiles, LoraWeights
from .tile_config import power_of_two

RANKS = 16
"""Ranks of a program."""
COLUMNS = 64
"""Outputs of a program."""
DEPTH = 64
"""Inputs of one product."""
SPLIT = 1024
"""Inputs of a program; at most `SPLITS` programs share the inputs of a linear."""
SPLITS = 4
LOW_BYTES = 8 << 20
"""Memory of `low`: more tiles are more launches."""
EMBED_BLOCK = 1024
_ALIGNMENT = 16


class TritonLora:
    """Adapters on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launches = 0

    def ops(self) -> LoraOps:
        launches = partial(getattr, self, "_launches")
        return LoraOps(
            self.load,
            self.load_table,
            unload,
            add,
            embed,
            self.load_experts,
            takes_tiles=True,
            device=self._device,
            launches=launches,
        )

    def load(self, site: LoraSite, slot: int, weights: LoraWeights) -> None:
        pieces = tuple(replace(piece, b_Or=piece.b_Or.unsqueeze(0)) for piece in weights.pieces)
        one = ExpertLora((0,), replace(weights, a_RI=weights.a_RI.unsqueeze(0), pieces=pieces))
        buffer, address_1 = self._packed([one], 1)
        site.weights[slot] = replace(weights, a_RI=weights.a_RI[:0], pieces=(), packed=buffer)
        self._point(site, slot, address_1, len(weights.a_RI))

    def load_table(self, site: LoraSite, slot: int, table_VE: Tensor) -> None:
        site.tables[slot] = table_VE.to(self._device)
        self._point(site, slot, torch.tensor([site.tables[slot].data_ptr()]), 1)

    def load_experts(self, site: LoraSite, slot: int, count: int, batches: Sequence[ExpertLora]) -> None:
        site.experts[slot], addresses_X = self._packed(batches, count)
        ranks = (batch.weights.a_RI.shape[1] for batch in batches)
        self._point(site, slot, addresses_X, max(ranks, default=0))  # other ranks may have all of them

    def _packed(self, batches: Sequence[ExpertLora], count: int) -> tuple[Tensor, Tensor]:
        """Copy weights in one piece. Return it and the address of each expert's header, 0 where it has none.

        A header has 64-bit integers: addresses of A and of scales, ranks, number of pieces; outputs, first
        rank, ranks and address of B of each.
        """
        end, many = 0, []
        for batch in batches:
            weights = batch.weights
            headers = torch.zeros(len(batch.experts), 4 + 5 * len(weights.pieces), dtype=torch.int64)
            parts = [headers, weights.a_RI, weights.scales_R.unsqueeze(0)]
            parts += [piece.b_Or for piece in weights.pieces]
            places = []
            for part in parts:
                step = _aligned(part[0].nbytes)
                places.append((part, end, step))
                end += step * len(part)
            many.append(places)
        buffer = torch.empty(end, dtype=torch.uint8, device=self._device)
        host, addresses_X = torch.zeros(end, dtype=torch.uint8), torch.zeros(count, dtype=torch.int64)
        for batch, places in zip(batches, many, strict=True):
            weights = batch.weights
            own, a, scales, *many_b = (
                buffer.data_ptr() + start + step * torch.arange(len(part)) for part, start, step in places
            )
            columns: list[Tensor | int] = [a, scales, weights.a_RI.shape[1], len(many_b)]
            for piece, b in zip(weights.pieces, many_b, strict=True):
                columns += [piece.start, piece.stop, piece.first, piece.b_Or.shape[2], b]
            for column, value in enumerate(columns):
                places[0][0][:, column] = value
            for part, start, step in places:
                numbers = part.flatten(1).contiguous().view(torch.uint8)
                host[start : start + step * len(part)].view(-1, step)[:, : numbers.shape[1]] = numbers
            addresses_X[list(batch.experts)] = own
        buffer.copy_(host)
        return buffer, addresses_X

    def _point(self, site: LoraSite, slot: int, addresses_X: Tensor, ranks: int) -> None:
        if site.on_device is None:
            slots = MAX_SLOTS * len(addresses_X)
            site.on_device = torch.zeros(slots, dtype=torch.int64, device=self._device)
        ranks = -(-ranks // RANKS) * RANKS
        if ranks > site.ranks:
            site.ranks = ranks
            self._launches += 1
        site.on_device.view(MAX_SLOTS, -1)[slot].copy_(addresses_X)


def unload(site: LoraSite, slot: int) -> None:
    """Clear the address in the order of steps: those launched before still read the weights, whose memory
    is only given to work that is queued later.
    """
    is_here = slot in site.weights or slot in site.tables or slot in site.experts
    if is_here and site.on_device is not None:
        site.on_device.view(MAX_SLOTS, -1)[slot].zero_()
    site.weights.pop(slot, None)
    site.tables.pop(slot, None)
    site.experts.pop(slot, None)


def add(site: LoraSite, x_TI: Tensor, y_TO: Tensor, rows: LoraTiles) -> None:
    """Implement `LoraOps.add`."""
    if site.on_device is None:
        return
    assert x_TI.stride(1) == y_TO.stride(1) == 1
    inputs, outputs = x_TI.shape[1], y_TO.shape[1]
    splits = min(SPLITS, triton.cdiv(inputs, SPLIT))
    part = triton.cdiv(triton.cdiv(inputs, splits), DEPTH) * DEPTH
    exact = x_TI.dtype == torch.float32
    bytes_each = 4 * splits * TILE_ROWS * site.ranks
    for tiles in torch.split(rows.tiles, max(1, LOW_BYTES // bytes_each)):
        entries = len(tiles) * TILE_ROWS
        low = torch.empty((splits, entries, site.ranks), dtype=torch.float32, device=x_TI.device)
        shrink_kernel[(len(tiles), site.ranks // RANKS, splits)](
            low,
            x_TI,
            site.on_device,
            tiles,
            x_TI.stride(0),
            inputs,
            entries,
            site.ranks,
            PART=part,
            ROWS=TILE_ROWS,
            RANKS=RANKS,
            DEPTH=DEPTH,
            PRECISION="ieee" if exact else "tf32",
            num_warps=4,
            num_stages=2 if exact else 4,
        )
        expand_kernel[(len(tiles), triton.cdiv(outputs, COLUMNS))](
            y_TO,
            low,
            x_TI,
            site.on_device,
            tiles,
            y_TO.stride(0),
            entries,
            site.ranks,
            SPLITS=splits,
            ROWS=TILE_ROWS,
            RANKS=RANKS,
            COLUMNS=COLUMNS,
            PRECISION="ieee" if exact else "tf32",
            num_warps=4,
            num_stages=2,
        )


@triton.jit(do_not_specialize_on_alignment=["x", "tiles"])
def shrink_kernel(
    low: tl.tensor,
    x: tl.tensor,
    addresses: tl.tensor,
    tiles: tl.tensor,
    x_row: tl.tensor,
    inputs: tl.tensor,
    entries: tl.tensor,
    width: tl.tensor,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write scale A x of some ranks and `PART` inputs for the rows of one tile.

    Reference: `_add` in `kernels/reference/lora.py`.
    """
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * (ROWS + 1))
    address = tl.load(addresses + slot, mask=slot >= 0, other=0)
    header = address.to(tl.pointer_type(tl.int64))
    ranks = tl.load(header + 2, mask=address != 0, other=0).to(tl.int32)
    first = tl.program_id(1) * RANKS
    if first < ranks:
        a = tl.multiple_of(tl.load(header).to(tl.pointer_type(x.dtype.element_ty)), 16)
        scales = tl.load(header + 1).to(tl.pointer_type(tl.float32))
        entry = tl.arange(0, ROWS)
        row = tl.load(tiles + tile * (ROWS + 1) + 1 + entry)
        rank = first + tl.arange(0, RANKS)
        real_m, real_r = row >= 0, rank < ranks
        x_rows = x + row.to(tl.int64)[:, None] * x_row
        a_ranks = a + rank.to(tl.int64)[None, :] * inputs
        acc = tl.zeros((ROWS, RANKS), dtype=tl.float32)
        begin = tl.program_id(2) * PART
        for start in range(begin, begin + PART, DEPTH):
            k = start + tl.arange(0, DEPTH)
            real_k = k < inputs
            left = tl.load(x_rows + k[None, :], mask=real_m[:, None] & real_k[None, :], other=0.0)
            right = tl.load(a_ranks + k[:, None], mask=real_k[:, None] & real_r[None, :], other=0.0)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        acc *= tl.load(scales + rank, mask=real_r, other=0.0)[None, :]
        place = (tl.program_id(2) * entries + tile * ROWS + entry)[:, None] * width + rank[None, :]
        tl.store(low + place, acc)


@triton.jit(do_not_specialize_on_alignment=["y", "x", "tiles"])
def expand_kernel(
    y: tl.tensor,
    low: tl.tensor,
    x: tl.tensor,
    addresses: tl.tensor,
    tiles: tl.tensor,
    y_row: tl.tensor,
    entries: tl.tensor,
    width: tl.tensor,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Add B low to some outputs of the rows of one tile. `x` has the dtype of B.

    Reference: `_add` in `kernels/reference/lora.py`.
    """
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * (ROWS + 1))
    address = tl.load(addresses + slot, mask=slot >= 0, other=0)
    header = address.to(tl.pointer_type(tl.int64))
    pieces = tl.load(header + 3, mask=address != 0, other=0).to(tl.int32)
    if pieces > 0:
        entry = tl.arange(0, ROWS)
        row = tl.load(tiles + tile * (ROWS + 1) + 1 + entry)
        real_m = row >= 0
        from_low = low + (tile * ROWS + entry)[:, None] * width
        begin = tl.program_id(1) * COLUMNS
        n = begin + tl.arange(0, COLUMNS)
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        is_mine = n < 0
        for number in range(pieces):
            piece = header + 4 + 5 * number
            start, stop = tl.load(piece).to(tl.int32), tl.load(piece + 1).to(tl.int32)
            ranks = tl.load(piece + 3).to(tl.int32)
            is_near = (start < begin + COLUMNS) & (stop > begin)
            ranks = tl.where(is_near, ranks, 0)
            first = tl.load(piece + 2).to(tl.int32)
            b = tl.load(piece + 4).to(tl.pointer_type(x.dtype.element_ty))
            inside = (n >= start) & (n < stop)
            is_mine = is_mine | inside
            for least in range(0, ranks, RANKS):
                r = least + tl.arange(0, RANKS)
                real_r = r < ranks
                left = tl.zeros((ROWS, RANKS), dtype=tl.float32)
                for split in tl.static_range(SPLITS):
                    place = from_low + split * entries * width + (first + r)[None, :]
                    left += tl.load(place, mask=real_m[:, None] & real_r[None, :], other=0.0)
                cell = b + (n - start).to(tl.int64)[None, :] * ranks + r[:, None]
                right = tl.load(cell, mask=real_r[:, None] & inside[None, :], other=0.0)
                acc = tl.dot(left, right.to(tl.float32), acc, input_precision=PRECISION)
        place = y + row.to(tl.int64)[:, None] * y_row + n[None, :]
        mask = real_m[:, None] & is_mine[None, :]
        acc += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, acc.to(y.dtype.element_ty), mask=mask)


def embed(site: LoraSite, ids_T: Tensor, x_TE: Tensor, scale: float, rows: LoraTiles) -> None:
    """Implement `LoraOps.embed`."""
    if site.on_device is None:
        return
    assert x_TE.stride(1) == 1
    width = x_TE.shape[1]
    block = min(EMBED_BLOCK, power_of_two(width))
    adapted_embedding_kernel[(len(rows.tiles) * TILE_ROWS, triton.cdiv(width, block))](
        x_TE, site.on_device, rows.tiles, ids_T, x_TE.stride(0), width, scale, ROWS=TILE_ROWS, BLOCK=block
    )


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["tiles", "ids"])
def adapted_embedding_kernel(
    x: tl.tensor,
    addresses: tl.tensor,
    tiles: tl.tensor,
    ids: tl.tensor,
    x_row: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a row of the adapter's own table, times `scale`, where its adapter has one.

    Reference: `_embed` in `kernels/reference/lora.py`.
    """
    tile, entry = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS
    slot = tl.load(tiles + tile * (ROWS + 1))
    row = tl.load(tiles + tile * (ROWS + 1) + 1 + entry).to(tl.int64)
    address = tl.load(addresses + slot, mask=(slot >= 0) & (row >= 0), other=0)
    if address != 0:
        table = address.to(tl.pointer_type(x.dtype.element_ty))
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        source = tl.load(ids + row).to(tl.int64)
        values = tl.load(table + source * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + row * x_row + column, (values * scale).to(x.dtype.element_ty), mask=inside)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
