"""Recurrent layers: short convolutions with gates (LFM2), gated delta nets (Qwen3.5), Kimi delta attention,
Mamba 1 (Jamba), Mamba-2 (Granite, Nemotron-H), and Mamba-2 beside attention (Falcon-H1).

T rows of the step, E hidden, C channels of the convolution on this rank, K inputs that it spans, H value
heads of this rank, B numbers of a value.
"""

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout
from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.recurrent import RecurrentState, ScanShape, ScanWeights

from ..checkpoint.safetensors import ShardSlice
from ..model_config.config import ModelConfig
from ..model_config.recurrent.config import RecurrentConfig
from ..weights.source import Weights
from .attention import rows_of
from .blocks import Mixer
from .forward_context import ForwardContext


def decay_rates(logs_H: Tensor) -> Tensor:
    """Return -exp(A_log), computed in float64: in float32 the last bit differs between CPUs."""
    return -logs_H.double().exp().float()


class RecurrentLayer:
    """Base of recurrent layers, each of which is a `Mixer`: the operations, and the layer's place in the
    state.
    """

    input: PackedLinear

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        assert config.recurrent is not None
        assert ops.recurrent is not None
        self.config: RecurrentConfig = config.recurrent
        self.ops, self.recurrent = ops, ops.recurrent
        self.rank = weights.rank
        stage = self.rank.layout.layers(config.num_layers)
        self.layer = config.layers_with(range(stage.start, layer), state=True)
        """Index in the recurrent state, which holds the layers of this stage."""
        self.eps = self.config.norm_eps or config.rms_norm_eps * config.scales.residual**2
        """Epsilon of norms inside the layer, whose rows are not divided by the residual multiplier."""

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        raise NotImplementedError

    def _place(self, forward: ForwardContext) -> tuple[RecurrentState, int, BatchLayout]:
        """Return the state, the layer's index in it, and the layout of the step's rows."""
        assert forward.states is not None
        assert forward.layout is not None
        return forward.states, self.layer, forward.layout

    def _read_conv(self, weights: Weights, name: str, *channels: ShardSlice) -> tuple[Tensor, Tensor | None]:
        """Read this rank's channels of the convolution: weights [K, C], and the bias [C] if it has one."""
        recurrent, bias_C = self.config, None
        weight_C1K = weights.floats(f"{name}.weight", recurrent.channels, 1, recurrent.conv_width)
        if recurrent.conv_bias:
            bias_C = _cut(weights.floats(f"{name}.bias", recurrent.channels), *channels)
        return _cut(weight_C1K[:, 0], *channels).t().contiguous(), bias_C


class ShortConv(RecurrentLayer):
    """Gated short convolution: output(c conv(b x)), with b, c and x of one linear."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        channels = self.rank.part(recurrent.channels)
        names = ("in_proj_b", "in_proj_c", "in_proj_x")
        weights.split("in_proj", dict.fromkeys(names, recurrent.channels))
        self.input = weights.linear(dict.fromkeys(names, channels), hidden, bias=recurrent.bias)
        self.weight_KC, self.bias_C = self._read_conv(weights, "conv", channels)
        self.output = weights.linear({"out_proj": hidden}, channels, bias=recurrent.out_bias)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        bcx, at = self.ops.linear(self.input, x_TE), self._place(forward)
        out_TC = self.recurrent.short_conv(bcx, self.weight_KC, self.bias_C, True, *at)
        return self.rank.row_parallel_linear(self.ops, self.output, out_TC, x_TE.shape[1])


class GatedDeltaNet(RecurrentLayer):
    """Gated delta net: a short convolution of (q, k, v), the gated delta rule, and a gated norm.

    Rows of the input linears are (q, k, v, z) and (b, a), whatever the order in the checkpoint.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        keys, values = self.rank.part(recurrent.key_heads), self.rank.part(recurrent.heads)
        sizes = recurrent.key_dim, recurrent.value_dim
        self.shape = ScanShape("delta", values.size, keys.size, *sizes, beta=recurrent.beta)
        key_rows, value_rows = rows_of(keys, recurrent.key_dim), rows_of(values, recurrent.value_dim)
        if recurrent.is_interleaved:
            self.input, self.gates = self._interleaved(weights, keys, hidden)
        else:
            parts = {"in_proj_q": key_rows, "in_proj_k": key_rows, "in_proj_v": value_rows}
            weights.split("in_proj_qkv", {name: rows.total for name, rows in parts.items()})
            self.input = weights.linear({**parts, "in_proj_z": value_rows}, hidden, bias=False)
            self.gates = weights.linear({"in_proj_b": values, "in_proj_a": values}, hidden, bias=False)
        self.weight_KC = _conv_of_qkv(weights, recurrent.conv_width, key_rows, key_rows, value_rows)
        heads = slice(values.start, values.stop)
        rate_H = decay_rates(weights.floats("A_log", recurrent.heads)[heads])
        bias_H = weights.floats("dt_bias", recurrent.heads)[heads].contiguous()
        self.weights = ScanWeights(rate_H, bias_H)
        norm_B = weights.floats("norm.weight", recurrent.value_dim)
        self.norm_HB = norm_B.expand(values.size, -1).contiguous()
        self.tiles_outputs = recurrent.has_tiled_outputs
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
        ops, recurrent, shape, at = self.ops, self.recurrent, self.shape, self._place(forward)
        qkvz, gates = ops.linear(self.input, x_TE), ops.linear(self.gates, x_TE)
        qkv_TC = recurrent.short_conv(qkvz[:, : shape.width], self.weight_KC, None, False, *at)
        out_THB = recurrent.scan(qkv_TC, gates, self.weights, shape, *at)
        z_THB = qkvz[:, shape.width :].view(len(x_TE), shape.heads, shape.value_dim)
        normed = recurrent.gated_norm(out_THB.view_as(z_THB), z_THB, self.norm_HB, self.eps, True)
        if self.tiles_outputs:
            normed = recurrent.swap_heads(normed.view(len(x_TE), shape.key_heads, -1, shape.value_dim))
        return self.rank.row_parallel_linear(ops, self.output, normed, x_TE.shape[1])


class Mamba1(RecurrentLayer):
    """Mamba 1: a short convolution of x, a selective scan whose time steps, keys and queries are linears of
    its result, and a gate.

    With tensor parallelism each rank has some channels, and all numbers of keys and queries, to which every
    rank adds its channels' part.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        groups = self.rank.part(recurrent.heads)
        channels = rows_of(groups, recurrent.value_dim)
        self.shape = ScanShape("s6", groups.size, 1, recurrent.key_dim, recurrent.value_dim)
        weights.split("in_proj", dict.fromkeys(("in_proj_x", "in_proj_z"), recurrent.values))
        self.input = weights.linear({"in_proj_x": channels}, hidden, bias=recurrent.bias)
        self.gate = weights.linear({"in_proj_z": channels}, hidden, bias=recurrent.bias)
        self.weight_KC, self.bias_C = self._read_conv(weights, "conv1d", channels)
        self.step_rank, keys = recurrent.step_rank, recurrent.key_dim
        narrow = ShardSlice.whole(self.step_rank + 2 * keys)
        self.narrow = weights.linear({"x_proj": narrow}, channels, bias=False)
        self.steps = weights.linear({"dt_proj": channels}, ShardSlice.whole(self.step_rank), bias=False)
        rate_CA = _cut(weights.floats("A_log", recurrent.values, keys), channels)
        rate_HAB = decay_rates(rate_CA).view(groups.size, -1, keys).transpose(1, 2).contiguous()
        bias_C, skip_C = (
            _cut(weights.floats(name, recurrent.values), channels) for name in ("dt_proj.bias", "D")
        )
        self.weights = ScanWeights(rate_HAB, bias_C, skip_C)
        self.step_norm_1R, self.key_norm_2A = self._read_norms(weights)
        self.output = weights.linear({"out_proj": hidden}, channels, bias=recurrent.out_bias)

    def _read_norms(self, weights: Weights) -> tuple[Tensor | None, Tensor | None]:
        """Read the norms' weights: of the rows that become time steps, and of keys and queries."""
        widths = {"dt": self.step_rank, "b": self.config.key_dim, "c": self.config.key_dim}
        names = {part: f"{part}_layernorm.weight" for part in widths}
        if self.config.has_step_weights:
            dt, b, c = (weights.vector(names[part], width) for part, width in widths.items())
        else:
            for name in names.values():  # some checkpoints have them, all 1
                weights.skip(name)
            dt, b, c = (torch.ones(w, dtype=weights.dtype, device=weights.device) for w in widths.values())
        return (None, None) if self.config.step_norm is None else (dt.unsqueeze(0), torch.stack((b, c)))

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        ops, recurrent, rank, at = self.ops, self.recurrent, self.step_rank, self._place(forward)
        x_TC = ops.linear(self.input, x_TE)
        x_TC = recurrent.short_conv(x_TC, self.weight_KC, self.bias_C, False, *at)
        width = rank + 2 * self.shape.key_dim
        narrow = self.rank.row_parallel_linear(ops, self.narrow, x_TC, width)
        narrow = self.rank.finish_all_reduce(ops, narrow)
        dt, pairs = narrow[:, :rank], narrow[:, rank:].unsqueeze(1)
        if self.key_norm_2A is not None:
            assert self.step_norm_1R is not None
            keys = pairs.view(len(x_TE), 2, -1)
            # A copy, as the norm below may give its result where this one has.
            pairs = ops.concat((ops.rms_norm(keys, self.key_norm_2A, self.eps).view_as(pairs),))
            dt = ops.rms_norm(dt.unsqueeze(1), self.step_norm_1R, self.eps).flatten(1)
        gates = ops.concat((ops.linear(self.steps, dt).unsqueeze(1), pairs)).flatten(1)
        out = recurrent.scan(x_TC, gates, self.weights, self.shape, *at)
        gated = recurrent.silu_mul(out, ops.linear(self.gate, x_TE))
        return self.rank.row_parallel_linear(ops, self.output, gated, x_TE.shape[1])


class Mamba2(RecurrentLayer):
    """Mamba-2: a short convolution of (x, B, C), a selective scan, and a norm of its gated result.

    Rows of the input linear are (z, x, B, C, dt). In the scan's terms x are values, B keys, C queries.
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
        self.weight_KC, self.bias_C = self._read_conv(weights, "conv1d", values, keys, keys)
        rate_H, bias_H, skip_H = (
            _cut(weights.floats(name, recurrent.heads), heads) for name in ("A_log", "dt_bias", "D")
        )
        self.weights = ScanWeights(decay_rates(rate_H), bias_H, skip_H)
        self.norm_GB, self.norms_first = None, recurrent.norm == "norm_first"
        if recurrent.norm is not None:
            self.norm_GB = _cut(weights.floats("norm.weight", recurrent.values), values).view(groups.size, -1)
        self.scales_N: Tensor | None = None
        if scales := config.scales.mamba_in:
            each = [
                torch.full((rows.size,), scale, device=weights.device)
                for rows, scale in zip(parts.values(), scales, strict=True)
            ]
            self.scales_N = torch.cat(each)
        self.output = weights.linear({"out_proj": hidden}, values, bias=recurrent.out_bias)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        ops, recurrent, shape, at = self.ops, self.recurrent, self.shape, self._place(forward)
        rows, values = ops.linear(self.input, x_TE), shape.heads * shape.value_dim
        if self.scales_N is not None:
            rows = recurrent.mul_add(rows, self.scales_N, None)
        gate, xbc, dt_TH = torch.split(rows, [values, shape.width, shape.heads], 1)
        xbc = recurrent.short_conv(xbc, self.weight_KC, self.bias_C, False, *at)
        out = recurrent.scan(xbc, dt_TH, self.weights, shape, *at)
        if self.norm_GB is None:
            normed = recurrent.silu_mul(out, gate)
        else:
            grouped = (len(x_TE), *self.norm_GB.shape)
            parts = out.view(grouped), gate.view(grouped)
            normed = recurrent.gated_norm(*parts, self.norm_GB, self.eps, self.norms_first)
        return self.rank.row_parallel_linear(ops, self.output, normed, x_TE.shape[1])


class KimiDeltaAttention(RecurrentLayer):
    """Gated delta net whose memory decays number by number of a key, with the sigmoid of a gate.

    Decays and the gate are computed through rows of `key_dim` numbers, which every rank has, or directly.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        recurrent, hidden = self.config, ShardSlice.whole(config.hidden_size)
        heads, dim = self.rank.part(recurrent.heads), recurrent.key_dim
        self.shape = ScanShape("kda", heads.size, heads.size, dim, dim, recurrent.limits)
        rows, inner = rows_of(heads, dim), ShardSlice.whole(dim)
        self.input = weights.linear(dict.fromkeys(("q_proj", "k_proj", "v_proj"), rows), hidden, bias=False)
        self.beta = weights.linear({"b_proj": heads}, hidden, bias=False)
        self.inner: PackedLinear | None = None
        shape: tuple[int, ...] = (recurrent.heads,)
        if recurrent.has_full_gates:
            self.decay = weights.linear({"f_proj": rows}, hidden, bias=False)
            self.gate = weights.linear({"g_proj": rows}, hidden, bias=False)
        else:
            self.inner = weights.linear({"f_a_proj": inner, "g_a_proj": inner}, hidden, bias=False)
            self.decay = weights.linear({"f_b_proj": rows}, inner, bias=False)
            self.gate = weights.linear({"g_b_proj": rows}, inner, bias=False)
            shape = 1, 1, recurrent.heads, 1
        self.weight_KC = _conv_of_qkv(weights, recurrent.conv_width, rows, rows, rows)
        rate_H = _cut(weights.floats("A_log", *shape).view(-1), heads)
        bias = _cut(weights.floats("dt_bias", recurrent.values), rows)
        self.weights = ScanWeights(decay_rates(rate_H), bias)
        self.norm_HB = weights.vector("o_norm.weight", dim).expand(heads.size, -1).contiguous()
        self.output = weights.linear({"o_proj": hidden}, rows, bias=False)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        ops, recurrent, shape, at = self.ops, self.recurrent, self.shape, self._place(forward)
        dim = shape.key_dim
        qkv_TC = recurrent.short_conv(ops.linear(self.input, x_TE), self.weight_KC, None, False, *at)
        decay_in = gate_in = x_TE
        if self.inner is not None:
            # A copy, as the other linears may give their results where this one has.
            inner = ops.concat((ops.linear(self.inner, x_TE).unsqueeze(1),)).flatten(1)
            decay_in, gate_in = inner[:, :dim], inner[:, dim:]
        beta_T1H = ops.linear(self.beta, x_TE).unsqueeze(1)
        gates = ops.concat((beta_T1H, ops.linear(self.decay, decay_in).unsqueeze(1))).flatten(1)
        out = recurrent.scan(qkv_TC, gates, self.weights, shape, *at)
        gate = ops.linear(self.gate, gate_in)  # before the norm, which may give its result where `x_TE` is
        normed = ops.rms_norm(out.view(len(x_TE), shape.heads, dim), self.norm_HB, self.eps).flatten(1)
        gated = recurrent.sigmoid_mul(normed, gate)
        return self.rank.row_parallel_linear(ops, self.output, gated, x_TE.shape[1])


class ParallelMixers:
    """Recurrent layer and attention side by side, whose results are added with a multiplier each."""

    def __init__(
        self, config: ModelConfig, recurrent: RecurrentLayer, attention: Mixer, ops: Ops, device: torch.device
    ) -> None:
        assert ops.recurrent is not None
        self.recurrent, self.attention, self.mul_add = recurrent, attention, ops.recurrent.mul_add
        self.input = recurrent.input
        scales, hidden = config.scales, (config.hidden_size,)
        self.by_recurrent_E = torch.full(hidden, scales.mamba_out, device=device)
        self.by_attention_E = torch.full(hidden, scales.attention_out, device=device)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        # The first result is moved before the second one may take its place.
        first_TE = self.mul_add(self.recurrent(x_TE, forward), self.by_recurrent_E, None)
        return self.mul_add(self.attention(x_TE, forward), self.by_attention_E, first_TE)


def _conv_of_qkv(weights: Weights, width: int, *rows: ShardSlice) -> Tensor:
    """Read the convolution of (q, k, v), [K, C]: a tensor for each, or one."""
    names = ("q_conv1d", "k_conv1d", "v_conv1d")
    weights.split("conv1d", {name: part.total for name, part in zip(names, rows, strict=True)})
    each = (
        weights.floats(f"{name}.weight", part.total, 1, width) for name, part in zip(names, rows, strict=True)
    )
    cut = [part_C1K[part.start : part.stop, 0] for part_C1K, part in zip(each, rows, strict=True)]
    return torch.cat(cut).t().contiguous()


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
