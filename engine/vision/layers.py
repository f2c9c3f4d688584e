"""Layers of a vision tower, and their requests for weights, which no format quantizes.

P patches of a tile, E hidden, F feed-forward, H heads, G of keys and values, D head dim.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from llmbox.kernels.ops import Ops, PackedLinear

from ..checkpoint.safetensors import ShardSlice, shown
from ..errors import ModelError
from ..model.encoder import attend
from ..model_config.vision.config import SLICE_PATCHES, TowerConfig, VisionActivation
from ..model_config.vision.families import BOUNDS
from ..weights.checkpoint import Checkpoint
from ..weights.source import WeightRequest


class TowerWeights:
    """Weights of a tower under a name prefix."""

    def __init__(self, source: Checkpoint, prefix: str = "") -> None:
        self._source, self._prefix = source, prefix

    @property
    def ops(self) -> Ops:
        return self._source.ops

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return self._source.device

    def at(self, prefix: str) -> "TowerWeights":
        return TowerWeights(self._source, f"{self._prefix}{prefix}.")

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.vector(self._prefix + name, size)

    def floats(self, name: str, *shape: int) -> Tensor:
        return self._source.floats(self._prefix + name, shape)

    def linear(
        self,
        names: Sequence[str],
        outputs: int | Sequence[int],
        inputs: int,
        *,
        bias: bool,
        order: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> PackedLinear:
        """Request one linear that stacks the named ones. `outputs`: of each, or of all alike. `order`,
        `transposed`: as in `WeightRequest`.
        """
        each = [outputs] * len(names) if isinstance(outputs, int) else outputs
        stack = {self._prefix + name: ShardSlice.whole(rows) for name, rows in zip(names, each, strict=True)}
        asked = WeightRequest("router", stack, ShardSlice.whole(inputs), bias, order, transposed)
        return self._source.packed(asked)

    def positions(self, tower: TowerConfig) -> Tensor | None:
        """Return the table of learned positions, with that of the class embedding; of columns and of rows
        [2, N, E] where each has its own.
        """
        if not tower.table:
            return None
        name, rows, hidden = tower.names.table, tower.table_rows, tower.hidden_size
        if tower.table == "axes":
            return self.floats(name, 2, rows, hidden).to(self.dtype)
        if tower.table == "bicubic_square":
            side = round(rows**0.5)
            return self.floats(name, side, side, hidden).view(rows, hidden).to(self.dtype)
        if tower.table == "places":
            return self.floats(name, rows, 2, hidden).transpose(0, 1).contiguous().to(self.dtype)
        return self.floats(name, rows + tower.class_positions, hidden).to(self.dtype)

    def bounds(self, linear: str) -> tuple[float, ...]:
        """Return the bounds of a linear that clips, of inputs and of results. They may be infinite."""
        at = self._prefix + linear.removesuffix(".linear")
        numbers = []
        for bound in BOUNDS:
            entry = self._source.entry(f"{at}.{bound}")
            numbers.append(float(self._source.read(entry, (ShardSlice.whole(1),))))
            if numbers[-1] != numbers[-1]:
                raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is not a number")
        return tuple(numbers)


class TowerNorm:
    """RMS norm or LayerNorm of a tower. The constructor reads its weights."""

    def __init__(
        self, weights: TowerWeights, name: str, size: int, eps: float, *, is_rms: bool, adds_one: bool = False
    ) -> None:
        self._ops, self._eps, self._is_rms = weights.ops, eps, is_rms
        self._weight = weights.vector(f"{name}.weight", size)
        self._bias = None if is_rms else weights.vector(f"{name}.bias", size)
        if adds_one:
            self._weight = self._weight.float() + 1

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_rms:
            return self._ops.rms_norm(x, self._weight, self._eps)
        return self._ops.layer_norm(x, None, self._weight, self._eps, self._bias)


class LayerScale:
    """Factors of a layer's result, one a column. The constructor reads them."""

    def __init__(self, weights: TowerWeights, name: str, size: int) -> None:
        self._factors_E = weights.vector(name, size)

    def __call__(self, x_PE: Tensor) -> Tensor:
        return x_PE * self._factors_E


ACTIVATIONS: Final[dict[VisionActivation, Callable[[Tensor], Tensor]]] = {
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": torch_functional.silu,
    "relu2": lambda x: torch_functional.relu(x).square(),
}


def activate(activation: VisionActivation, x_TF: Tensor) -> Tensor:
    return ACTIVATIONS[activation](x_TF)


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Angles of RoPE [P, D] and the rows that see each other: runs of patches, whole tiles or windows."""

    grid: tuple[int, int]
    """Rows and columns of patches."""
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
        outputs: Sequence[int],
        inputs: int,
        *,
        bias: bool,
        clips: bool,
        order: tuple[int, ...] | None = None,
    ) -> None:
        self._ops = weights.ops
        groups: list[tuple[Sequence[str], Sequence[int]]] = [(names, outputs)]
        if clips:
            groups = [((name,), (rows,)) for name, rows in zip(names, outputs, strict=True)]
        each = None if order is None or not clips else order[: outputs[0]]
        self._parts = []
        for number, (group, sizes) in enumerate(groups):
            # Values keep their order: of three linears the first two are rotated.
            rows = order if not clips else each if number < 2 else None
            packed = weights.linear(group, sizes, inputs, bias=bias, order=rows)
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


class GridConv:
    """Gated convolution over rows and columns of patches: output(c conv(b x)), with b, c and x of one linear
    (LFM3-VL). Taps are added in a fixed order, so that bits do not depend on threads.
    """

    def __init__(self, tower: TowerConfig, weights: TowerWeights) -> None:
        self.ops, self.merge, self.width = weights.ops, tower.merge, tower.conv_width
        hidden, width, weights = tower.hidden_size, tower.conv_width, weights.at(tower.names.conv)
        self.input = weights.linear(("in_proj",), 3 * hidden, hidden, bias=False)
        weight_E1KK = weights.floats("spatial_conv.weight", hidden, 1, width, width)
        self.weight_KKE = weight_E1KK[:, 0].permute(1, 2, 0).contiguous()
        self.output = weights.linear(("out_proj",), hidden, hidden, bias=False)

    def __call__(self, x_PE: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the results; patches that are merged stand next to each other."""
        (rows, columns), merge, edge = grid, self.merge, self.width // 2
        b_PE, c_PE, values_PE = self.ops.linear(self.input, x_PE).chunk(3, dim=1)
        squares = (b_PE * values_PE).float().view(rows // merge, columns // merge, merge, merge, -1)
        plane_YXE = squares.transpose(1, 2).reshape(rows, columns, -1)
        sum_YXE = torch.zeros_like(plane_YXE)
        padded_YXE = torch_functional.pad(plane_YXE, (0, 0, edge, edge, edge, edge))
        del squares, plane_YXE
        for down in range(self.width):
            for across in range(self.width):
                taps_YXE = padded_YXE[down : down + rows, across : across + columns]
                sum_YXE += taps_YXE * self.weight_KKE[down, across]
        back = sum_YXE.view(rows // merge, merge, columns // merge, merge, -1).transpose(1, 2)
        return self.ops.linear(self.output, c_PE * back.reshape(c_PE.shape).to(c_PE.dtype))


class TowerLayer:
    """Attention, or a convolution, and MLP with norms before them, and maybe norms or factors after them.

    Without `has_mlp` it ends after attention.
    """

    def __init__(
        self, tower: TowerConfig, weights: TowerWeights, *, has_conv: bool = False, has_mlp: bool = True
    ) -> None:
        self.tower, self.ops, names = tower, weights.ops, tower.names
        hidden, inner, eps = tower.hidden_size, tower.intermediate_size, tower.eps

        def norm(name: str) -> TowerNorm | None:
            return TowerNorm(weights, name, hidden, eps, is_rms=tower.is_rms) if name else None

        self.norm1, self.norm2 = norm(names.norms[0]), norm(names.norms[1] if has_mlp else "")

        def after(part: int) -> TowerNorm | LayerScale | None:
            if names.scales:
                return LayerScale(weights, names.scales[part], hidden)
            return norm(names.norms[2 + part]) if len(names.norms) > 2 else None

        self.after_attention = after(0)
        if has_mlp:
            self.after_mlp = after(1)
            mlp, clips = tower.mlp_bias, tower.clips
            *ups, down = names.mlp
            self.up = TowerLinear(weights, ups, [inner] * len(ups), hidden, bias=mlp, clips=clips)
            self.down = TowerLinear(weights, [down], [hidden], inner, bias=mlp, clips=clips)
        self.conv = GridConv(tower, weights) if has_conv else None
        if not has_conv:
            self._load_attention(weights)

    def _load_attention(self, weights: TowerWeights) -> None:
        tower, names, hidden = self.tower, self.tower.names, self.tower.hidden_size
        order, bias, clips = _rotated_order(tower), tower.attention_bias, tower.clips
        self.qkv = TowerLinear(
            weights, names.qkv, tower.qkv_rows, hidden, bias=bias, clips=clips, order=order
        )
        bias = tower.output_bias
        self.output = TowerLinear(weights, [names.output], [hidden], hidden, bias=bias, clips=clips)
        self.norms_nD = None
        if names.qk_norms and tower.wide_norms:
            self.norms_nD = torch.stack([weights.vector(f"{norm}.weight", hidden) for norm in names.qk_norms])
        elif names.qk_norms:
            width, turn = tower.head_dim, None if order is None else list(order[: tower.head_dim])
            rows = [weights.vector(f"{name}.weight", width) for name in names.qk_norms]
            rows = rows if turn is None else [row[turn] for row in rows]
            repeated = [row.expand(heads, -1) for row, heads in zip(rows, tower.head_counts, strict=False)]
            self.norms_nD = torch.cat(repeated).contiguous()
        self.value_norm_HD = None
        if tower.projector == "gemma4":
            self.value_norm_HD = torch.ones(
                tower.num_heads, tower.head_dim, dtype=weights.dtype, device=weights.device
            )

    def run(self, x_PE: Tensor, layout: PatchLayout) -> Generator[float, None, Tensor]:
        """Run the layer; yields the operations of each piece of it. Pieces follow from the layout alone."""
        assert self.norm1 is not None
        tower, (patches, hidden) = self.tower, x_PE.shape
        pieces = [slice(first, first + SLICE_PATCHES) for first in range(0, patches, SLICE_PATCHES)]
        if self.conv is None:
            out_PE = yield from self._run_attention(x_PE, layout, pieces)
        else:
            out_PE = x_PE + self.conv(self.norm1(x_PE), layout.grid)
            yield 8.0 * patches * hidden**2
        if self.norm2 is None:
            return out_PE
        for rows in pieces:
            result = self._mlp(self.norm2(out_PE[rows]))
            out_PE[rows] += result if self.after_mlp is None else self.after_mlp(result)
            yield 6.0 * min(SLICE_PATCHES, patches) * hidden * tower.intermediate_size
        return out_PE

    def _run_attention(
        self, x_PE: Tensor, layout: PatchLayout, pieces: Sequence[slice]
    ) -> Generator[float, None, Tensor]:
        assert self.norm1 is not None
        tower, (patches, hidden) = self.tower, x_PE.shape
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
        return out_PE

    def _project(self, x_PE: Tensor, layout: PatchLayout, where: slice, out_PnD: Tensor) -> None:
        """Write queries, keys and values of some patches."""
        tower, ops, (heads, kv_heads, _) = self.tower, self.ops, self.tower.head_counts
        rows = self.qkv(x_PE).view(len(x_PE), -1, tower.head_dim)
        qk_PnD, v_PGD = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
        if self.norms_nD is not None:
            normed = ops.rms_norm(qk_PnD.reshape(-1, *self.norms_nD.shape), self.norms_nD, tower.eps)
            qk_PnD = normed.view(qk_PnD.shape)
        if self.value_norm_HD is not None:
            v_PGD = ops.rms_norm(v_PGD, self.value_norm_HD, tower.eps)
        if layout.cos_PD is not None and layout.sin_PD is not None:
            qk_PnD = ops.rotary(qk_PnD, layout.cos_PD[where], layout.sin_PD[where])
        shared = heads // kv_heads  # query heads that read the same keys and values
        out_PnD[:, :heads] = qk_PnD[:, :heads]
        out_PnD[:, heads : 2 * heads] = qk_PnD[:, heads:].repeat_interleave(shared, 1)
        out_PnD[:, 2 * heads :] = v_PGD.repeat_interleave(shared, 1)

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
        if len(self.tower.names.mlp) == 2:
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
    own; Llama 4 neighboring numbers, the first half of them by its column; Kimi K2.5 every other two of them.
    """
    part = tower.head_dim // 4
    if tower.projector == "gemma4":
        starts = (range(2 * part, 3 * part), range(part), range(3 * part, 4 * part), range(part, 2 * part))
    elif tower.rope == "pairs":
        half, width = 2 * part, 4 * part
        starts = (range(half, width, 2), range(0, half, 2), range(half + 1, width, 2), range(1, half, 2))
    elif tower.rope == "alternating_pairs":
        width = 4 * part
        starts = (range(2, width, 4), range(0, width, 4), range(3, width, 4), range(1, width, 4))
    else:
        return None
    head = [row for rows in starts for row in rows]
    rotated = [start * tower.head_dim + row for start in range(2 * tower.num_heads) for row in head]
    return (*rotated, *range(len(rotated), len(rotated) + tower.hidden_size))
