"""Recurrent layers: short convolutions with gates (LFM2), gated delta nets (Qwen3.5), Mamba-2 (Granite).

T rows of the step, E hidden, C channels of the convolution on this rank, K inputs that it spans, H value
heads of this rank, B numbers of a value.
"""

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.recurrent import ScanShape, ScanWeights

from ..model_config.config import ModelConfig
from ..model_config.recurrent import RecurrentConfig
from ..partition import ShardSlice
from ..weights.source import Weights
from .attention import rows_of
from .forward_context import ForwardContext


class RecurrentLayer:
    """Base of recurrent layers: the operations, and the layer's place in the state."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        assert config.recurrent is not None
        assert ops.recurrent is not None
        self.config: RecurrentConfig = config.recurrent
        self.ops, self.recurrent = ops, ops.recurrent
        self.rank = weights.rank
        stage = self.rank.layout.layers(config.num_layers)
        self.layer = config.layers_with(range(stage.start, layer), state=True)
        """Index in the recurrent state, which holds the layers of this stage."""
        self.eps = config.rms_norm_eps * config.scales.residual**2
        """Epsilon of norms inside the layer, whose rows are not divided by the residual multiplier."""


class ShortConv(RecurrentLayer):
    """Gated short convolution: output(c conv(b x)), with b, c and x of one linear."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        channels = self.rank.part(recurrent.channels)
        mine = slice(channels.start, channels.stop)
        names = ("in_proj_b", "in_proj_c", "in_proj_x")
        weights.split("in_proj", dict.fromkeys(names, recurrent.channels))
        self.input = weights.linear(dict.fromkeys(names, channels), hidden, bias=recurrent.bias)
        weight_C1K = weights.floats("conv.weight", recurrent.channels, 1, recurrent.conv_width)
        self.weight_KC = weight_C1K[mine, 0].t().contiguous()
        self.bias_C = weights.floats("conv.bias", recurrent.channels)[mine] if recurrent.conv_bias else None
        self.output = weights.linear({"out_proj": hidden}, channels, bias=recurrent.bias)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        assert forward.states is not None
        assert forward.layout is not None
        bcx = self.ops.linear(self.input, x_TE)
        out_TC = self.recurrent.short_conv(
            bcx, self.weight_KC, self.bias_C, True, forward.states, self.layer, forward.layout
        )
        return self.rank.row_parallel_linear(self.ops, self.output, out_TC, x_TE.shape[1])


class GatedDeltaNet(RecurrentLayer):
    """Gated delta net: a short convolution of (q, k, v), the gated delta rule, and a gated norm.

    Rows of the input linears are (q, k, v, z) and (b, a), whatever the order in the checkpoint.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        keys, values = self.rank.part(recurrent.key_heads), self.rank.part(recurrent.heads)
        self.shape = ScanShape(
            "delta", values.size, keys.size, key_dim=recurrent.key_dim, value_dim=recurrent.value_dim
        )
        key_rows, value_rows = rows_of(keys, recurrent.key_dim), rows_of(values, recurrent.value_dim)
        if recurrent.is_interleaved:
            self.input, self.gates = self._interleaved(weights, keys, hidden)
        else:
            parts = {"in_proj_q": key_rows, "in_proj_k": key_rows, "in_proj_v": value_rows}
            weights.split("in_proj_qkv", {name: rows.total for name, rows in parts.items()})
            self.input = weights.linear({**parts, "in_proj_z": value_rows}, hidden, bias=False)
            self.gates = weights.linear({"in_proj_b": values, "in_proj_a": values}, hidden, bias=False)
        weight_C1K = weights.floats("conv1d.weight", recurrent.channels, 1, recurrent.conv_width)
        self.weight_KC = _cut(weight_C1K[:, 0], key_rows, key_rows, value_rows).t().contiguous()
        heads = slice(values.start, values.stop)
        rate_H = -weights.floats("A_log", recurrent.heads)[heads].exp()
        bias_H = weights.floats("dt_bias", recurrent.heads)[heads].contiguous()
        self.weights = ScanWeights(rate_H, bias_H)
        norm_B = weights.floats("norm.weight", recurrent.value_dim)
        self.norm_HB = norm_B.expand(values.size, -1).contiguous()
        self.output = weights.linear({"out_proj": hidden}, value_rows, bias=False)

    def _interleaved(
        self, weights: Weights, keys: ShardSlice, hidden: ShardSlice
    ) -> tuple[PackedLinear, PackedLinear]:
        """Read the linears whose rows are (q, k, v, z) and (b, a) of one key head after another."""
        shape = self.shape
        group = shape.heads // shape.key_heads
        wide = group * shape.value_dim
        qkvz = (shape.key_dim, shape.key_dim, wide, wide)
        inputs = {"in_proj_qkvz": rows_of(keys, sum(qkvz))}
        gates = {"in_proj_ba": rows_of(keys, 2 * group)}
        return (
            weights.linear(inputs, hidden, bias=False, order=_by_part(qkvz, shape.key_heads)),
            weights.linear(gates, hidden, bias=False, order=_by_part((group, group), shape.key_heads)),
        )

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        assert forward.states is not None
        assert forward.layout is not None
        ops, recurrent, shape = self.ops, self.recurrent, self.shape
        at = forward.states, self.layer, forward.layout
        qkvz, gates = ops.linear(self.input, x_TE), ops.linear(self.gates, x_TE)
        qkv_TC = recurrent.short_conv(qkvz[:, : shape.width], self.weight_KC, None, False, *at)
        out_THB = recurrent.scan(qkv_TC, gates, self.weights, shape, *at)
        z_THB = qkvz[:, shape.width :].view(len(x_TE), shape.heads, shape.value_dim)
        normed = recurrent.gated_norm(out_THB.view_as(z_THB), z_THB, self.norm_HB, self.eps, True)
        return self.rank.row_parallel_linear(ops, self.output, normed, x_TE.shape[1])


class Mamba2(RecurrentLayer):
    """Mamba-2: a short convolution of (x, B, C), a selective scan, and a norm of its gated result.

    Rows of the input linear are (z, x, B, C, dt). In the words of the scan x are values, B keys, C queries.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        groups, heads = self.rank.part(recurrent.key_heads), self.rank.part(recurrent.heads)
        self.shape = ScanShape(
            "ssm", heads.size, groups.size, recurrent.key_dim, recurrent.value_dim, recurrent.limits
        )
        keys, values = rows_of(groups, recurrent.key_dim), rows_of(heads, recurrent.value_dim)
        parts = {"in_proj_z": values, "in_proj_x": values, "in_proj_B": keys, "in_proj_C": keys}
        parts["in_proj_dt"] = heads
        weights.split("in_proj", {name: rows.total for name, rows in parts.items()})
        self.input = weights.linear(parts, hidden, bias=recurrent.bias)
        weight_C1K = weights.floats("conv1d.weight", recurrent.channels, 1, recurrent.conv_width)
        self.weight_KC = _cut(weight_C1K[:, 0], values, keys, keys).t().contiguous()
        self.bias_C = None
        if recurrent.conv_bias:
            self.bias_C = _cut(weights.floats("conv1d.bias", recurrent.channels), values, keys, keys)
        rate_H, bias_H, skip_H = (
            _cut(weights.floats(name, recurrent.heads), heads) for name in ("A_log", "dt_bias", "D")
        )
        self.weights = ScanWeights(-rate_H.exp(), bias_H, skip_H)
        norm = _cut(weights.floats("norm.weight", recurrent.values), values)
        self.norm_GB = norm.view(groups.size, -1)
        self.output = weights.linear({"out_proj": hidden}, values, bias=recurrent.bias)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        assert forward.states is not None
        assert forward.layout is not None
        ops, recurrent, shape = self.ops, self.recurrent, self.shape
        at = forward.states, self.layer, forward.layout
        rows, values = ops.linear(self.input, x_TE), shape.heads * shape.value_dim
        gate, xbc, dt_TH = torch.split(rows, [values, shape.width, shape.heads], 1)
        xbc = recurrent.short_conv(xbc, self.weight_KC, self.bias_C, False, *at)
        out = recurrent.scan(xbc, dt_TH, self.weights, shape, *at)
        grouped = (len(x_TE), *self.norm_GB.shape)
        normed = recurrent.gated_norm(out.view(grouped), gate.view(grouped), self.norm_GB, self.eps, False)
        return self.rank.row_parallel_linear(ops, self.output, normed, x_TE.shape[1])


def _cut(rows: Tensor, *parts: ShardSlice) -> Tensor:
    """Return this rank's slices of consecutive parts of a small tensor."""
    starts = [sum(part.total for part in parts[:number]) for number in range(len(parts))]
    each = zip(starts, parts, strict=True)
    return torch.cat([rows[start + part.start : start + part.stop] for start, part in each])


def _by_part(sizes: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Return the order of rows that brings parts of these sizes, stored head by head, behind each other."""
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return tuple(
        head * sum(sizes) + start + row
        for start, size in zip(starts, sizes, strict=True)
        for head in range(heads)
        for row in range(size)
    )
