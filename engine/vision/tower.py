"""Vision tower: a transformer over the patches of a picture, in both directions.

P patches of a tile, E hidden, F feed-forward, H heads, D head dim, K colors of a patch.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from llmbox.kernels.ops import Ops

from ..device.device import move
from ..model.encoder import attend
from ..model_config.vision.config import ImageProcessorConfig, TowerConfig, VisionActivation
from ..model_config.vision.shape import SLICE_PATCHES
from .weights import TowerNorm, TowerWeights

ACTIVATIONS: Final[dict[VisionActivation, Callable[[Tensor], Tensor]]] = {
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": torch_functional.silu,
}


def activate(activation: VisionActivation, x_TF: Tensor) -> Tensor:
    return ACTIVATIONS[activation](x_TF)


Project = Callable[[Tensor, tuple[int, int], int], Tensor]
"""`Projector` of `encoder.py`."""
SLICE_OPERATIONS: Final = 6e10
"""Operations after which a step may run; a chunk of a prompt has more on most models."""


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Angles of RoPE [P, D] and the rows that see each other: runs of patches, whole tiles or windows."""

    cos_PD: Tensor | None
    sin_PD: Tensor | None
    lens: Sequence[int]
    starts_N1: Tensor


class TowerLinear:
    """Linears of the same rows, stacked as far as they read the same numbers."""

    def __init__(
        self,
        weights: TowerWeights,
        names: Sequence[str],
        outputs: int,
        inputs: int,
        *,
        bias: bool,
        clips: bool,
        order: tuple[int, ...] | None = None,
    ) -> None:
        self._ops = weights.ops
        groups = [(name,) for name in names] if clips else [tuple(names)]
        each = None if order is None or not clips else order[:outputs]
        self._parts = []
        for number, group in enumerate(groups):
            # Values keep their order: of three linears the first two are rotated.
            rows = order if not clips else each if number < 2 else None
            packed = weights.linear(group, outputs, inputs, bias=bias, order=rows)
            self._parts.append((packed, weights.bounds(group[0]) if clips else None))

    def __call__(self, x_PI: Tensor) -> Tensor:
        results = []
        for packed, bounds in self._parts:
            if bounds is None:
                results.append(self._ops.linear(packed, x_PI))
                continue
            result = self._ops.linear(packed, x_PI.clamp(bounds[0], bounds[1]))
            results.append(result.clamp_(bounds[2], bounds[3]))
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)


class TowerLayer:
    """Attention and MLP with norms before them, and maybe after them."""

    def __init__(self, tower: TowerConfig, weights: TowerWeights) -> None:
        self.tower, self.ops, names = tower, weights.ops, tower.names
        hidden, inner, eps = tower.hidden_size, tower.intermediate_size, tower.eps

        def norm(name: str) -> TowerNorm | None:
            return TowerNorm(weights, name, hidden, eps, is_rms=tower.is_rms) if name else None

        self.norm1, self.norm2 = norm(names.norm1), norm(names.norm2)
        self.after_attention, self.after_mlp = norm(names.after_attention), norm(names.after_mlp)
        projections, outputs = [names.query, names.key, names.value], hidden
        if names.stacked:
            projections, outputs = [names.stacked], 3 * hidden
        order = _rotated_order(tower)
        bias, mlp, clips = tower.attention_bias, tower.mlp_bias, tower.clips
        self.qkv = TowerLinear(weights, projections, outputs, hidden, bias=bias, clips=clips, order=order)
        self.output = TowerLinear(weights, [names.output], hidden, hidden, bias=bias, clips=clips)
        ups = [name for name in (names.gate, names.up) if name]
        self.up = TowerLinear(weights, ups, inner, hidden, bias=mlp, clips=clips)
        self.down = TowerLinear(weights, [names.down], hidden, inner, bias=mlp, clips=clips)
        self.norms_2HD = None
        if names.query_norm:
            width, turn = tower.head_dim, None if order is None else list(order[: tower.head_dim])
            rows = [weights.vector(f"{name}.weight", width) for name in (names.query_norm, names.key_norm)]
            rows = rows if turn is None else [row[turn] for row in rows]
            self.norms_2HD = torch.cat([row.expand(tower.num_heads, -1) for row in rows]).contiguous()
        self.value_norm_HD = None
        if tower.projector == "gemma4":
            self.value_norm_HD = torch.ones(
                tower.num_heads, tower.head_dim, dtype=weights.dtype, device=weights.device
            )

    def run(self, x_PE: Tensor, layout: PatchLayout) -> Generator[float, None, Tensor]:
        """Run the layer; yields the operations of each piece of it. Pieces follow from the layout alone."""
        assert self.norm1 is not None
        assert self.norm2 is not None
        tower, (patches, hidden) = self.tower, x_PE.shape
        pieces = [slice(first, first + SLICE_PATCHES) for first in range(0, patches, SLICE_PATCHES)]
        size = (patches, 3 * tower.num_heads, tower.head_dim)
        heads_PnD = torch.empty(size, dtype=x_PE.dtype, device=x_PE.device)
        for rows in pieces:
            self._project(self.norm1(x_PE[rows]), layout, rows, heads_PnD[rows])
            yield 6.0 * min(SLICE_PATCHES, patches) * hidden**2
        out_PE, start = torch.empty_like(x_PE), 0
        for attended in self._attend(heads_PnD, layout):
            rows = slice(start, start + len(attended))
            start = rows.stop
            result = self.output(attended)
            result = result if self.after_attention is None else self.after_attention(result)
            torch.add(x_PE[rows], result, out=out_PE[rows])
            yield len(attended) * hidden * (4.0 * max(layout.lens) + 2.0 * hidden)
        del heads_PnD
        for rows in pieces:
            result = self._mlp(self.norm2(out_PE[rows]))
            out_PE[rows] += result if self.after_mlp is None else self.after_mlp(result)
            yield 6.0 * min(SLICE_PATCHES, patches) * hidden * tower.intermediate_size
        return out_PE

    def _project(self, x_PE: Tensor, layout: PatchLayout, where: slice, out_PnD: Tensor) -> None:
        """Write queries, keys and values of some patches."""
        tower, ops, heads = self.tower, self.ops, self.tower.num_heads
        rows = self.qkv(x_PE).view(len(x_PE), -1, tower.head_dim)
        qk_PnD, v_PHD = rows[:, : 2 * heads], rows[:, 2 * heads :]
        if self.norms_2HD is not None:
            qk_PnD = ops.rms_norm(qk_PnD, self.norms_2HD, tower.eps)
        if self.value_norm_HD is not None:
            v_PHD = ops.rms_norm(v_PHD, self.value_norm_HD, tower.eps)
        if layout.cos_PD is not None and layout.sin_PD is not None:
            qk_PnD = ops.rotary(qk_PnD, layout.cos_PD[where], layout.sin_PD[where])
        out_PnD[:, : 2 * heads], out_PnD[:, 2 * heads :] = qk_PnD, v_PHD

    def _attend(self, heads_PnD: Tensor, layout: PatchLayout) -> Iterator[Tensor]:
        """Yield the results of attention for some patches after another."""
        ops, tower = self.ops, self.tower
        q_PHD, k_PHD, v_PHD = torch.split(heads_PnD, tower.num_heads, dim=1)
        scale = tower.head_dim**-0.5 if tower.scales_queries else 1.0
        if ops.attend_whole_texts is not None:
            yield from ops.attend_whole_texts(q_PHD, k_PHD, v_PHD, layout.lens, scale)
        else:
            yield attend(ops, layout.lens, layout.starts_N1, q_PHD, k_PHD, v_PHD, scale)

    def _mlp(self, x_PE: Tensor) -> Tensor:
        rows, activation = self.up(x_PE), self.tower.activation
        if not self.tower.names.gate:
            return self.down(activate(activation, rows))
        return self.down(gate(self.ops, activation, rows))


def gate(ops: Ops, activation: VisionActivation, rows_P2F: Tensor) -> Tensor:
    """Return activation(gate) * up, the gate first."""
    if activation in {"silu", "gelu_tanh"}:
        return ops.gate_mul(rows_P2F, activation)
    first, up = rows_P2F.chunk(2, dim=1)
    return activate(activation, first.contiguous()).mul_(up)


def _rotated_order(tower: TowerConfig) -> tuple[int, ...] | None:
    """Return the rows of query, key and value in the order that `Ops.rotary` wants: None as they are.

    Gemma 4 rotates the first half of a head by its column, the second by its row, each with halves of its
    own.
    """
    if tower.projector != "gemma4":
        return None
    part = tower.head_dim // 4
    head = [*range(2 * part, 3 * part), *range(part), *range(3 * part, 4 * part), *range(part, 2 * part)]
    rotated = [start * tower.head_dim + row for start in range(2 * tower.num_heads) for row in head]
    return (*rotated, *range(len(rotated), len(rotated) + tower.hidden_size))


class VisionTower:
    """Patches, positions, layers and the last norm. The constructor reads all weights."""

    def __init__(self, tower: TowerConfig, processor: ImageProcessorConfig, weights: TowerWeights) -> None:
        self.tower, self.ops, names = tower, weights.ops, tower.names
        self._dtype, self._device = weights.dtype, weights.device
        size = 3 * tower.frames * tower.patch_size**2
        self._patch = weights.linear((names.patch,), tower.hidden_size, size, bias=tower.patch_bias)
        self._values_3C = _pixel_values(tower, processor).to(weights.dtype).to(self._device)
        self._table = weights.positions(tower)

        def norm(name: str, width: int = tower.hidden_size) -> TowerNorm | None:
            return TowerNorm(weights, name, width, tower.eps, is_rms=tower.is_rms) if name else None

        self._patch_norm, self._embedded_norm = norm(names.patch_norm, size), norm(names.embedded_norm)
        self._pre_norm = norm(names.pre_norm)
        self._layers = [
            TowerLayer(tower, weights.at(f"{names.layers}.{number}")) for number in range(tower.num_layers)
        ]
        self._post_norm = norm(names.post_norm if tower.num_layers == tower.stored_layers else "")

    def run(self, pixels_YX3: Tensor, project: Project) -> Generator[None, None, Tensor]:
        """Run the tower over a tile, uint8 [height, width, 3], to [L, R, E]; yields after a layer or less."""
        tower = self.tower
        rows, columns = (size // tower.patch_size for size in pixels_YX3.shape[:2])
        places_P2 = _places(tower, rows, columns)
        patches_PK = self._patches(pixels_YX3, places_P2)
        if self._patch_norm is not None:
            patches_PK = self._patch_norm(patches_PK)
        x_PE = self.ops.linear(self._patch, patches_PK)
        if self._embedded_norm is not None:
            x_PE = self._embedded_norm(x_PE)
        if self._table is not None:
            x_PE = x_PE + self._positions(places_P2, rows, columns)
        if self._pre_norm is not None:
            x_PE = self._pre_norm(x_PE)
        order_P, layout, windowed = self._layouts(places_P2, rows, columns)
        if order_P is not None:
            x_PE = x_PE[order_P]
        grid, levels = (rows, columns), dict[int, Tensor]()
        for number, layer in enumerate(self._layers):
            x_PE = yield from _pace(layer.run(x_PE, layout if number in tower.full_layers else windowed))
            if number in tower.deepstack:
                level = tower.deepstack.index(number) + 1
                levels[level] = project(x_PE, grid, level)
            yield
        if order_P is not None:
            x_PE = x_PE[torch.argsort(order_P)]
        if self._post_norm is not None:
            x_PE = self._post_norm(x_PE)
        levels[0] = project(x_PE, grid, 0)
        return torch.stack([levels[level] for level in sorted(levels)])

    def _patches(self, pixels_YX3: Tensor, places_P2: Tensor) -> Tensor:
        """Return normalized patches [P, K] in the order of `places_P2`."""
        tower, side = self.tower, self.tower.patch_size
        rows, columns = (size // side for size in pixels_YX3.shape[:2])
        # SmolVLM2 has tiles of 27.4 patches.
        pixels_YX3 = move(pixels_YX3[: rows * side, : columns * side], self._device)
        values = torch.stack([self._values_3C[color][pixels_YX3[:, :, color].long()] for color in range(3)])
        patches = values.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4)
        patches = patches[self._put(places_P2[:, 0]), self._put(places_P2[:, 1])]
        if tower.channels_last:
            patches = patches.permute(0, 2, 3, 1)
        elif tower.frames > 1:
            patches = patches.unsqueeze(2).expand(-1, -1, tower.frames, -1, -1)
        return patches.reshape(len(places_P2), -1)

    def _put(self, index: Tensor) -> Tensor:
        return move(index, self._device)

    def _positions(self, places_P2: Tensor, rows: int, columns: int) -> Tensor:
        """Return the learned positions [P, E]."""
        table, tower = self._table, self.tower
        assert table is not None
        side = round(tower.table_rows**0.5)
        row_P, column_P = places_P2.unbind(1)
        match tower.table:
            case "whole":
                return table[self._put(row_P * columns + column_P)]
            case "axes" | "places":
                return table[0][self._put(column_P)] + table[1][self._put(row_P)]
            case "buckets":
                index = _buckets(rows, side)[row_P] * side + _buckets(columns, side)[column_P]
                return table[self._put(index)]
            case "antialiased":
                square = table.float().view(side, side, -1).permute(2, 0, 1).unsqueeze(0)
                sized = torch_functional.interpolate(
                    square, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
                )
                return sized.reshape(tower.hidden_size, -1).T.to(self._dtype)
            case _:
                found = torch.zeros(len(places_P2), tower.hidden_size, device=table.device)
                for row_taps, row_weights in _taps(row_P, rows, side):
                    for taps, weights in _taps(column_P, columns, side):
                        index, share_P1 = row_taps * side + taps, (row_weights * weights).unsqueeze(1)
                        found += table[self._put(index)].float() * self._put(share_P1)
                return found.to(self._dtype)

    def _layouts(
        self, places_P2: Tensor, rows: int, columns: int
    ) -> tuple[Tensor | None, PatchLayout, PatchLayout]:
        """Return the order of patches by windows (None: as they are), and the layouts of layers that see the
        whole tile and of the others.
        """
        tower, device = self.tower, self._device
        order_P, lens = None, [len(places_P2)]
        windows = lens
        if tower.windows:
            order_P, windows = _windows(tower, rows, columns)
            places_P2 = places_P2[order_P]
        cos_PD, sin_PD = _angles(tower, places_P2, device)

        def layout(each: list[int]) -> PatchLayout:
            starts = torch.tensor([0, *each]).cumsum(0).int()
            return PatchLayout(cos_PD, sin_PD, each, move(starts, device))

        return None if order_P is None else move(order_P, device), layout(lens), layout(windows)


def _pace(pieces: Generator[float, None, Tensor]) -> Generator[None, None, Tensor]:
    """Yield where `SLICE_OPERATIONS` are done."""
    done = 0.0
    while True:
        try:
            done += next(pieces)
        except StopIteration as end:
            found: Tensor = end.value
            return found
        if done >= SLICE_OPERATIONS:
            done = 0.0
            yield


def _pixel_values(tower: TowerConfig, processor: ImageProcessorConfig) -> Tensor:
    """Return the number of each color's 256 levels, [3, 256]."""
    levels = torch.arange(256, dtype=torch.float64) * processor.rescale
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (processor.mean, processor.std))
    values = (levels - mean.unsqueeze(1)) / std.unsqueeze(1)
    return (2 * (values - 0.5) if tower.projector == "gemma4" else values).float()


def _places(tower: TowerConfig, rows: int, columns: int) -> Tensor:
    """Return row and column of each patch, [P, 2]: line by line, or square by square of those merged."""
    merge = tower.merge if tower.by_merge else 1
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
    return squares.reshape(-1, 2)


def _buckets(count: int, side: int) -> Tensor:
    """Return the row of a square table for each of `count` rows of patches."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    fractions = (torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    return torch.bucketize(fractions, boundaries, right=True)


def _taps(index_P: Tensor, count: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return the two rows of a table that each patch lies between, and their weights. Corners are aligned."""
    source = index_P.float() * (side - 1) / max(1, count - 1)
    low = source.floor()
    return [
        ((low.long() + step).clamp(0, side - 1), (1 - (source - low - step).abs()).clamp(min=0))
        for step in (0, 1)
    ]


def _angles(
    tower: TowerConfig, places_P2: Tensor, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tables of `Ops.rotary` [P, D]: the first half of each is for rows, the rest for columns."""
    if not tower.rope:
        return None, None
    width = tower.head_dim
    exponents = torch.arange(0, width // 2, 2, dtype=torch.float32) / (width // 2)
    down = across = 1.0 / tower.rope_theta**exponents
    if tower.rope == "alternating":
        every = 1.0 / tower.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        down, across = every[0::2], every[1::2]
    row_P1, column_P1 = torch.split(places_P2.float(), 1, dim=1)
    half = torch.cat([row_P1 * down, column_P1 * across], dim=1)
    cos, sin = half.cos(), half.sin()
    return move(torch.cat([cos, cos], 1), device), move(torch.cat([-sin, sin], 1), device)


def _windows(tower: TowerConfig, rows: int, columns: int) -> tuple[Tensor, list[int]]:
    """Return the order of patches by windows, and the patches of each window."""
    merge, side, unit = tower.merge, tower.windows, tower.merge**2
    tall, wide = rows // merge, columns // merge
    squares = torch.arange(tall * wide).view(tall, wide)
    found = [
        squares[top : top + side, left : left + side].reshape(-1)
        for top in range(0, tall, side)
        for left in range(0, wide, side)
    ]
    order_P = (torch.cat(found).unsqueeze(1) * unit + torch.arange(unit)).reshape(-1)
    return order_P, [len(window) * unit for window in found]
