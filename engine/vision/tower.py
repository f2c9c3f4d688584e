"""Vision tower: a transformer over the patches of an image, in both directions.

P patches of a tile, C rows of the class embedding, E hidden, F feed-forward, H heads, D head dim, K colors of
a patch.
"""

from collections.abc import Callable, Generator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from ..device.device import move
from ..model_config.vision.config import SLICE_PATCHES, ImageProcessorConfig, TowerConfig
from .layers import PatchLayout, TowerLayer, TowerNorm, TowerWeights, activate

Project = Callable[[Tensor, tuple[int, int], int], Tensor]
"""`Projector` of `encoder.py`."""
SLICE_OPERATIONS: Final = 6e10
"""Operations after which a step may run; a chunk of a prompt has more on most models."""


PROJECTED_PATCHES: Final = 512
"""Patches that a projector reads at once: its inner rows are wide (13,696 numbers in GLM-4.1V)."""


class WindowMerger:
    """Attention within small windows of patches, each of which then becomes one patch (MiniCPM-V)."""

    def __init__(self, tower: TowerConfig, weights: TowerWeights) -> None:
        self.ops, self.patches, hidden = weights.ops, tower.window_merge**2, tower.hidden_size
        wide, inner = self.patches * hidden, self.patches * tower.intermediate_size
        self.attention = TowerLayer(tower, weights, has_mlp=False)
        self.norm = TowerNorm(weights, "pre_norm", wide, tower.eps, is_rms=False)
        self.up = weights.linear(("linear_1",), inner, wide, bias=True)
        self.down = weights.linear(("linear_2",), hidden, inner, bias=True)

    def run(self, x_PE: Tensor, layout: PatchLayout) -> Generator[float, None, Tensor]:
        """Merge patches whose windows follow each other; yields the operations of each piece."""
        x_PE = yield from self.attention.run(x_PE, layout)
        merged: list[Tensor] = []
        for piece_PE in torch.split(x_PE, SLICE_PATCHES):
            squares_QWE = piece_PE.view(-1, self.patches, x_PE.shape[1])
            inner = activate("gelu_tanh", self.ops.linear(self.up, self.norm(squares_QWE.flatten(1))))
            mean_QE = squares_QWE.float().mean(1).to(x_PE.dtype)
            merged.append(self.ops.linear(self.down, inner) + mean_QE)
            yield 4.0 * len(squares_QWE) * inner.shape[1] * self.patches * x_PE.shape[1]
        return torch.cat(merged)


class VisionTower:
    """Patches, positions, layers and the last norm. The constructor reads all weights."""

    def __init__(self, tower: TowerConfig, processor: ImageProcessorConfig, weights: TowerWeights) -> None:
        self.tower, self.ops, names = tower, weights.ops, tower.names
        self._dtype, self._device = weights.dtype, weights.device
        size = 3 * tower.frames * tower.patch_size**2
        self._patch = weights.linear((names.patch,), tower.hidden_size, size, bias=tower.patch_bias)
        self._values_3C = _pixel_values(tower, processor).to(weights.dtype).to(self._device)
        self._table = weights.positions(tower)
        self._class_CE = None
        if names.class_embedding and tower.class_rows > 1:
            self._class_CE = weights.floats(names.class_embedding, tower.class_rows, tower.hidden_size)
            self._class_CE = self._class_CE.to(weights.dtype)
        elif names.class_embedding:
            assert self._table is not None
            token_E = weights.vector(names.class_embedding, tower.hidden_size)
            rows, first = tower.table_rows, 0 if tower.class_is_last else 1
            own = rows if tower.class_is_last else 0
            self._class_CE = token_E + self._table[own : own + 1]
            self._table = self._table[first : first + rows]

        def norm(name: str, width: int = tower.hidden_size) -> TowerNorm | None:
            return TowerNorm(weights, name, width, tower.eps, is_rms=tower.is_rms) if name else None

        self._patch_norm, self._embedded_norm = norm(names.patch_norm, size), norm(names.embedded_norm)
        self._pre_norm = norm(names.pre_norm)
        self._layers = [
            TowerLayer(tower, weights.at(f"{names.layers}.{number}"), has_conv=number in tower.conv_layers)
            for number in range(tower.num_layers)
        ]
        self._windows = None
        if names.window_merger:
            self._windows = WindowMerger(tower, weights.at(names.window_merger))
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
        del patches_PK
        if self._embedded_norm is not None:
            x_PE = self._embedded_norm(x_PE)
        if self._table is not None:
            x_PE = x_PE + self._positions(places_P2, rows, columns)
        if self._class_CE is not None:
            x_PE = torch.cat([self._class_CE, x_PE])
        if self._pre_norm is not None:
            x_PE = self._pre_norm(x_PE)
        order_P, layout, windowed = self._layouts(places_P2, rows, columns)
        if order_P is not None:
            x_PE = x_PE[order_P]
        grid, levels = (rows, columns), dict[int, Tensor]()
        joined = {0: x_PE} if 0 in tower.joined_layers else {}
        for number, layer in enumerate(self._layers):
            x_PE = yield from _pace(layer.run(x_PE, layout if number in tower.full_layers else windowed))
            if number + 1 in tower.joined_layers:
                joined[number + 1] = x_PE
            if number in tower.deepstack:
                level = tower.deepstack.index(number) + 1
                levels[level] = yield from self._project(project, x_PE, grid, level)
            yield
            if self._windows is not None and number == tower.window_layer:
                runs = [self._windows.patches] * (len(x_PE) // self._windows.patches)
                x_PE = yield from _pace(self._windows.run(x_PE, self._plain_layout(grid, runs)))
                grid = (rows // tower.window_merge, columns // tower.window_merge)
                layout = windowed = self._plain_layout(grid, [len(x_PE)])
                yield
        if order_P is not None:
            x_PE = x_PE[torch.argsort(order_P)]
        if self._post_norm is not None:
            x_PE = self._post_norm(x_PE)
        if tower.joined_layers:
            x_PE = torch.cat([joined[number] for number in tower.joined_layers], dim=1)
        if self._class_CE is not None:
            x_PE = x_PE[tower.class_rows :]
        levels[0] = yield from self._project(project, x_PE, grid, 0)
        return torch.stack([levels[level] for level in sorted(levels)])

    def _plain_layout(self, grid: tuple[int, int], lens: list[int]) -> PatchLayout:
        """Return a layout without RoPE for runs of patches that see each other."""
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        return PatchLayout(grid, None, None, lens, move(starts, self._device))

    def _project(
        self, project: Project, x_PE: Tensor, grid: tuple[int, int], level: int
    ) -> Generator[None, None, Tensor]:
        """Run the projector; yields between pieces where patches that are merged stand next to each other."""
        unit = self.tower.merge**2
        step = max(1, PROJECTED_PATCHES // unit) * unit if self.tower.by_merge else len(x_PE)
        parts: list[Tensor] = []
        for piece_PE in torch.split(x_PE, step):
            if parts:
                yield
            parts.append(project(piece_PE, grid, level))
        return torch.cat(parts)

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
            case "buckets" | "nearest":
                index = _buckets(tower, rows, side)[row_P] * side + _buckets(tower, columns, side)[column_P]
                return table[self._put(index)]
            case "antialiased":
                square = table.float().view(side, side, -1).permute(2, 0, 1).unsqueeze(0)
                sized = torch_functional.interpolate(
                    square, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
                )
                return sized.reshape(tower.hidden_size, -1).T.to(self._dtype)
            case _:  # in pieces, as it takes float32
                pieces = torch.split(places_P2, SLICE_PATCHES)
                return torch.cat([self._mean_positions(piece_P2, rows, columns) for piece_P2 in pieces])

    def _mean_positions(self, places_P2: Tensor, rows: int, columns: int) -> Tensor:
        table, side = self._table, round(self.tower.table_rows**0.5)
        assert table is not None
        row_P, column_P = places_P2.unbind(1)
        if self.tower.table == "cropped":
            rows = columns = max(rows, columns)
        found = torch.zeros(len(places_P2), self.tower.hidden_size, device=table.device)
        rules = {"bicubic": _cubic_taps, "bicubic_square": _cubic_taps, "bilinear_edges": _edge_taps}
        rules["cropped"] = _edge_taps
        taps_of = rules.get(self.tower.table, _taps)
        for row_taps, row_weights in taps_of(row_P, rows, side):
            for taps, weights in taps_of(column_P, columns, side):
                index, share_P1 = row_taps * side + taps, (row_weights * weights).unsqueeze(1)
                found += table[self._put(index)].float().mul_(self._put(share_P1))
        return found.to(self._dtype)

    def _layouts(
        self, places_P2: Tensor, rows: int, columns: int
    ) -> tuple[Tensor | None, PatchLayout, PatchLayout]:
        """Return the order of patches by windows (None: as they are), and the layouts of layers that see the
        whole tile and of the others.
        """
        tower, device = self.tower, self._device
        order_P, lens = None, [len(places_P2) + (0 if self._class_CE is None else tower.class_rows)]
        windows = lens
        if tower.windows:
            order_P, windows = _windows(tower, rows, columns)
            places_P2 = places_P2[order_P]
        cos_PD, sin_PD = _angles(tower, places_P2, device, has_class=self._class_CE is not None)

        def layout(each: list[int]) -> PatchLayout:
            starts = torch.tensor([0, *each]).cumsum(0).int()
            return PatchLayout((rows, columns), cos_PD, sin_PD, each, move(starts, device))

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
    if tower.projector == "llama4":  # its processor computes in bfloat16
        levels, mean, std = (each.bfloat16() for each in (levels / processor.rescale, mean, std))
        values = (levels * processor.rescale - mean.unsqueeze(1)) / std.unsqueeze(1)
    return (2 * (values - 0.5) if tower.projector == "gemma4" else values).float()


def _places(tower: TowerConfig, rows: int, columns: int) -> Tensor:
    """Return row and column of each patch, [P, 2]: line by line, or square by square of those merged."""
    merge, window = tower.merge if tower.by_merge else 1, tower.window_merge
    rows, columns = rows // window, columns // window
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
    inside = torch.cartesian_prod(torch.arange(window), torch.arange(window))
    return (squares.unsqueeze(1) * window + inside).reshape(-1, 2)


def _buckets(tower: TowerConfig, count: int, side: int) -> Tensor:
    """Return the row of a square table for each of `count` rows of patches."""
    boundaries, places = torch.arange(1 / side, 1.0, 1 / side), torch.arange(count, dtype=torch.float32)
    fractions = places / count
    if tower.table == "buckets":
        fractions = (places * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    return torch.bucketize(fractions, boundaries, right=True)


def _taps(index_P: Tensor, count: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return the two rows of a table that each patch lies between, and their weights. Corners are aligned."""
    return _linear_taps(index_P.float() * (side - 1) / max(1, count - 1), side)


def _edge_taps(index_P: Tensor, count: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return the same where edges are aligned; rows beyond them are those at the edge."""
    return _linear_taps((index_P.float() + 0.5) * side / count - 0.5, side)


def _linear_taps(source: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    low = source.floor()
    return [
        ((low.long() + step).clamp(0, side - 1), (1 - (source - low - step).abs()).clamp(min=0))
        for step in (0, 1)
    ]


def _cubic_taps(index_P: Tensor, count: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return the four rows of a table around each patch and their weights (cubic convolution, a = -0.75).
    Edges are aligned, and rows beyond them are those at the edge.
    """
    source = (index_P.float() + 0.5) * side / count - 0.5
    low = source.floor()
    found = []
    for step in (-1, 0, 1, 2):
        far = (source - low - step).abs()
        near = (1.25 * far - 2.25) * far * far + 1
        outer = ((-0.75 * far + 3.75) * far - 6) * far + 3
        found.append(((low.long() + step).clamp(0, side - 1), torch.where(far <= 1, near, outer)))
    return found


def _angles(
    tower: TowerConfig, places_P2: Tensor, device: torch.device, *, has_class: bool
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
    if tower.rope == "pairs":
        places_P2 = places_P2 + 1
    if has_class:
        places_P2 = torch_functional.pad(places_P2, (0, 0, 1, 0))
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
