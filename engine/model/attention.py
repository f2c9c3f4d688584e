"""Attention over the paged KV cache.

T rows, E hidden, H query heads and G kv heads of this rank, D head dim, n = H + G heads that RoPE rotates.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from llmbox.kernels.ops import AttentionPlan, KVCache, Ops, PackedLinear

from ..checkpoint.safetensors import ShardSlice
from ..model_config.architecture import OWN_GATES
from ..model_config.attention import LayerSizes
from ..model_config.config import ModelConfig
from ..weights.source import Weights, norm_weight
from .forward_context import ForwardContext


class Attention:
    """Grouped-query attention with RoPE, optional per-head QK-norm, sliding window and logit softcap."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, ops: Ops, inputs: int | None = None
    ) -> None:
        """`inputs`: width of the rows that it reads; None: that of hidden states."""
        self.rank = rank = weights.rank
        self.ops = ops
        stage = rank.layout.layers(config.num_layers)
        sizes = config.sizes_of(layer)
        self.writes_kv = sizes.kv_source == layer
        """False if this layer reads the keys and values of an earlier one, and has none."""
        self.has_values = sizes.has_values
        before = range(stage.start, sizes.kv_source)
        self.layer = config.layers_with(before, state=False)
        """Index in the KV cache, which holds the layers of this stage."""
        sliding = config.sliding_layers(before)
        self.layer_of_kind = self.layer - sliding if config.windows[layer] is None else sliding
        """Index in the KV cache of the layer's kind (sliding-window or full), where the kinds differ."""
        heads, kv_heads = rank.part(sizes.heads), rank.layout.kv_heads(sizes.kv_heads)
        self.heads, self.kv_heads, self.head_dim = heads.size, kv_heads.size, sizes.head_dim
        self.value_dim = sizes.value_dim
        self.scale = config.scales.attention or self.head_dim**-0.5
        self.softcap = config.scales.attention_cap
        self.sinks_H = None
        if config.has_sinks and sizes.has_sinks:
            sinks = weights.floats("sinks", sizes.heads)
            self.sinks_H = sinks[heads.start : heads.stop].contiguous()
        self.eps = config.rms_norm_eps
        self.window = config.windows[layer]
        self.rope = config.layer_ropes[layer]
        """Index of this layer's RoPE table."""
        self.query_rope = config.query_rope(self.rope)
        """Index of another table for its queries."""
        self.norms_after_rope = config.norms_after_rope
        self._order = config.ropes[self.rope].order(self.head_dim)
        self.gate = config.attention_gate
        """Linear with gates of the results, with which the rows of the stacked linear end."""
        self._by_group = config.stacks_by_group
        self.input = self.qkv = weights.linear(
            self._stacked_rows(weights, sizes, heads, kv_heads),
            ShardSlice.whole(inputs or config.hidden_size),
            bias=config.qkv_bias,
            order=self._rows_in_order(),
        )
        self.head_gate = self.spread = None
        if config.has_head_gate:
            hidden = ShardSlice.whole(config.hidden_size)
            self.head_gate = weights.linear({"g_proj": heads}, hidden, bias=False)
            self.spread = spread_gates(ops, weights, self.heads, self.head_dim)
        self.norm_nD = self._make_norms(config, weights)
        outputs = {"o_proj": ShardSlice.whole(config.hidden_size)}
        self.output = weights.linear(outputs, rows_of(heads, self.value_dim), bias=config.o_bias)
        self.sub_norm_Q = None
        if config.has_sub_norms:
            self.sub_norm_Q = weights.vector("attn_sub_norm.weight", rows_of(heads, self.head_dim).size)
        self.gate_function = config.gate_function
        gated = self.gate is not None or config.has_head_gate or config.has_sub_norms
        self._attend = ops.attention if gated else ops.before(self.output).attention

    def _stacked_rows(
        self, weights: Weights, sizes: LayerSizes, heads: ShardSlice, kv_heads: ShardSlice
    ) -> dict[str, ShardSlice]:
        """Return this rank's rows of the linears that the stacked one is made of, by name."""
        width = self.head_dim
        q, k, v = rows_of(heads, width), rows_of(kv_heads, width), rows_of(kv_heads, self.value_dim)
        outputs = {"q_proj": rows_of(heads, 2 * width) if self.gate == "q_proj" else q}
        if self.writes_kv:
            outputs |= {"k_proj": k, "v_proj": v} if self.has_values else {"k_proj": k}
        else:
            for name in ("k_proj.", "v_proj.", "k_norm."):  # some checkpoints have them, unused
                weights.skip(name)
        if self.gate in OWN_GATES:
            outputs[self.gate] = q
        if self._by_group:
            outputs = {"qkv_proj": rows_of(kv_heads, (sizes.heads // sizes.kv_heads + 2) * width)}
        return outputs

    def _rows_in_order(self) -> tuple[int, ...] | None:
        """Return the row order of the stacked linear: query and key heads reordered, values as stored, gates
        last, which checkpoints have behind each query. None for the order of the checkpoint.
        """
        width, gated = self.head_dim, self.gate == "q_proj"
        order = self._order or range(width)
        if self._by_group:
            return self._groups_in_order(order)
        if self._order is None and not gated:
            return None
        queries = [head * width * (1 + gated) for head in range(self.heads)]
        begin = self.heads * width * (1 + gated)
        keys = [begin + head * width for head in range(self.kv_heads)]
        begin_values = begin + self.kv_heads * width
        values = range(begin_values, begin_values + self.kv_heads * self.value_dim)
        turned = [head + dim for head in (*queries, *keys) for dim in order]
        gates = [head + width + dim for head in queries for dim in range(width)] if gated else []
        if self.gate in OWN_GATES:
            gates = list(range(values.stop, values.stop + self.heads * width))
        return (*turned, *values, *gates)

    def _groups_in_order(self, order: Sequence[int]) -> tuple[int, ...]:
        """Return the same for a stack of the queries, the key and the value of each KV head in turn."""
        width, each = self.head_dim, self.heads // self.kv_heads + 2
        heads = range(0, self.kv_heads * each * width, width)
        queries = [head for number, head in enumerate(heads) if number % each < each - 2]
        turned = [head + dim for head in (*queries, *heads[each - 2 :: each]) for dim in order]
        return (*turned, *(head + dim for head in heads[each - 1 :: each] for dim in range(width)))

    def _make_norms(self, config: ModelConfig, weights: Weights) -> Tensor | None:
        """Stack one norm weight per head, so that queries and keys are normed in one operation. None where
        heads are not normed.
        """
        is_normed = config.qk_norm == "no_weight" and config.ropes[self.rope].rotary_dim
        if is_normed or config.qk_norm == "no_weight_anywhere":
            rows = self.heads + self.kv_heads, self.head_dim
            return torch.ones(rows, dtype=weights.dtype, device=weights.device)
        if config.qk_norm != "heads":
            return None
        q_D = norm_weight(config, weights, "q_norm", self.head_dim)
        k_D = norm_weight(config, weights, "k_norm", self.head_dim)
        if self._order is not None:
            q_D, k_D = q_D[list(self._order)], k_D[list(self._order)]
        return torch.cat((q_D.expand(self.heads, -1), k_D.expand(self.kv_heads, -1)))

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        """Return partial results for `TensorParallel.add_rms_norm`, [T, E]."""
        ops, plan = self.ops, forward.plans[self.window]
        rows = self._project(x_TE).view(len(x_TE), -1, self.head_dim)
        qkv, gates = rows[:, : self.heads + 2 * self.kv_heads], rows[:, self.heads + 2 * self.kv_heads :]
        q_THD = self._rotate_and_write_kv(qkv, forward, plan)
        special = self.softcap, self.sinks_H
        out = self._attend(q_THD, *self._cache(forward), plan, self.scale, *special)
        if self.gate is not None:
            out = self._multiply(out, gates.flatten(1))
        if self.head_gate is not None:
            out = self._multiply(out, ops.linear(self.spread, ops.linear(self.head_gate, x_TE)))
        if self.sub_norm_Q is not None:
            out = ops.before(self.output).rms_norm(out, self.sub_norm_Q, self.eps)
        return self.rank.row_parallel_linear(ops, self.output, out, x_TE.shape[1])

    def _project(self, x_TE: Tensor) -> Tensor:
        """Return queries, keys, values and gates: rows of the stacked linear."""
        return self.ops.linear(self.qkv, x_TE)

    def _multiply(self, out: Tensor, gates: Tensor) -> Tensor:
        assert self.ops.recurrent is not None
        if self.gate_function == "softplus":
            return self.ops.recurrent.softplus_mul(out, gates)
        return self.ops.recurrent.sigmoid_mul(out, gates)

    def _rotate_and_write_kv(self, qkv: Tensor, forward: ForwardContext, plan: AttentionPlan) -> Tensor:
        """Apply QK-norm and RoPE, write KV to the cache: [T, H + 2 G, D] -> queries [T, H, D]."""
        ops, rotated = self.ops, self.heads + self.kv_heads
        angles = self._angles(forward, self.rope)
        if self.norms_after_rope or self.query_rope != self.rope:
            return self._rotate_apart(qkv, forward, plan)
        if ops.rotate_and_write is not None:
            norm_nD, cache = self.norm_nD, self._cache(forward)
            qk_TnD = ops.rotate_and_write(qkv, norm_nD, self.eps, *angles, *cache, plan)
        else:
            qk_TnD = qkv[:, :rotated]
            if self.norm_nD is not None:
                qk_TnD = ops.rms_norm(qk_TnD, self.norm_nD, self.eps)
            qk_TnD = ops.rotary(qk_TnD, *angles)
            ops.write_kv(*self._cache(forward), qk_TnD[:, self.heads :], qkv[:, rotated:], plan)
        return qk_TnD[:, : self.heads]

    def _angles(self, forward: ForwardContext, rope: int) -> tuple[Tensor, Tensor]:
        """Return a table of cosines and one of sines, as wide as the heads of this layer."""
        width = self.head_dim
        return forward.cos_ATD[rope, :, :width], forward.sin_ATD[rope, :, :width]

    def _cache(self, forward: ForwardContext) -> tuple[KVCache, int]:
        """Return this layer's cache, and its index there."""
        if forward.window_cache is None:
            return forward.cache, self.layer
        return (forward.cache if self.window is None else forward.window_cache), self.layer_of_kind

    def _rotate_apart(self, qkv: Tensor, forward: ForwardContext, plan: AttentionPlan) -> Tensor:
        """Do as `_rotate_and_write_kv` where queries have a separate rotary table, or norms come last."""
        ops, heads, rotated = self.ops, self.heads, self.heads + self.kv_heads
        qk_TnD = qkv[:, :rotated]
        if self.norm_nD is not None and not self.norms_after_rope:
            qk_TnD = ops.rms_norm(qk_TnD, self.norm_nD, self.eps)
        if self.query_rope == self.rope:
            qk_TnD = ops.rotary(qk_TnD, *self._angles(forward, self.rope))
        if self.norm_nD is not None and self.norms_after_rope:
            qk_TnD = ops.rms_norm(qk_TnD, self.norm_nD, self.eps)
        q_THD, k_TGD = qk_TnD[:, :heads], qk_TnD[:, heads:]
        if self.query_rope != self.rope:
            k_TGD = ops.rotary(k_TGD, *self._angles(forward, self.rope))
            q_THD = ops.rotary(q_THD, *self._angles(forward, self.query_rope))
        ops.write_kv(*self._cache(forward), k_TGD, qkv[:, rotated:], plan)
        return q_THD


class NarrowValueAttention(Attention):
    """Attention whose values are narrower than its keys (MiMo V2), and multiplied by one number. The cache
    holds them widened by zeros.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        widen_DV = config.scales.values * torch.eye(self.head_dim, self.value_dim)
        packed = ops.pack_router(widen_DV.to(weights.device, weights.dtype), None)
        self.widen = ops.stack_heads([packed] * self.kv_heads)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        ops, plan, width = self.ops, forward.plans[self.window], self.head_dim
        rows, keys_end = ops.linear(self.qkv, x_TE), (self.heads + self.kv_heads) * width
        values_TGD = ops.linear_by_head(
            self.widen, rows[:, keys_end:].view(len(rows), self.kv_heads, self.value_dim)
        )
        whole = ops.concat((rows[:, :keys_end].unsqueeze(1), values_TGD.flatten(1).unsqueeze(1)))
        q_THD = self._rotate_and_write_kv(whole.view(len(x_TE), -1, width), forward, plan)
        out = ops.attention(q_THD, *self._cache(forward), plan, self.scale, self.softcap, self.sinks_H)
        out_THV = out.view(len(x_TE), self.heads, width)[..., : self.value_dim]
        return self.rank.row_parallel_linear(
            ops, self.output, ops.concat((out_THV,)).flatten(1), x_TE.shape[1]
        )


def spread_gates(ops: Ops, weights: Weights, heads: int, width: int) -> PackedLinear:
    """Return the linear that repeats the gate of a head for all its dimensions, which loses nothing."""
    ones_HH = torch.eye(heads, dtype=weights.dtype, device=weights.device)
    return ops.pack_router(ones_HH.repeat_interleave(width, 0), None)


def rows_of(heads: ShardSlice, head_dim: int) -> ShardSlice:
    return ShardSlice(heads.total * head_dim, heads.start * head_dim, heads.stop * head_dim)


class FullWidthQKNormAttention(Attention):
    """Attention whose QK-norm spans all heads at once (OLMo 2), so it cannot be tensor parallel."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        assert self.rank.layout.tp == 1
        self.q_norm = self._in_order(weights.vector("q_norm.weight", self.heads * self.head_dim))
        self.k_norm = self._in_order(weights.vector("k_norm.weight", self.kv_heads * self.head_dim))
        self.both_norms = None
        if self.heads == self.kv_heads:
            self.both_norms = torch.stack((self.q_norm, self.k_norm))

    def _in_order(self, norm: Tensor) -> Tensor:
        """Reorder the weights of a norm as RoPE reorders the dimensions of each head."""
        if self._order is None:
            return norm
        return norm.view(-1, self.head_dim)[:, list(self._order)].flatten()

    def _rotate_and_write_kv(self, qkv: Tensor, forward: ForwardContext, plan: AttentionPlan) -> Tensor:
        angles = self._angles(forward, self.rope)
        q_THD, k_TGD = self._norm(qkv.flatten(1))
        q_THD, k_TGD = self.ops.rotary(q_THD, *angles), self.ops.rotary(k_TGD, *angles)
        values = qkv[:, self.heads + self.kv_heads :]
        self.ops.write_kv(*self._cache(forward), k_TGD, values, plan)
        return q_THD

    def _norm(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Norm queries and keys: [T, (H + 2 G) D] -> [T, H, D], [T, G, D].

        Queries and keys of one width are normed in one operation: two results of the same operation and
        shape may share one scratch buffer.
        """
        tokens, q, k = len(rows), len(self.q_norm), len(self.k_norm)
        if self.both_norms is not None:
            both = rows[:, : q + k].view(tokens, 2, q)
            qk = self.ops.rms_norm(both, self.both_norms, self.eps).view(tokens, -1, self.head_dim)
            return qk[:, : self.heads], qk[:, self.heads :]
        q_TQ = self.ops.rms_norm(rows[:, :q].unsqueeze(1), self.q_norm.unsqueeze(0), self.eps)
        k_TK = self.ops.rms_norm(rows[:, q : q + k].unsqueeze(1), self.k_norm.unsqueeze(0), self.eps)
        return q_TQ.view(tokens, -1, self.head_dim), k_TK.view(tokens, -1, self.head_dim)


class SharedAttention(Attention):
    """Attention of a block that several layers share, with adapters of each (Zamba2).

    R: rank of adapters, Q: queries, keys and values of this rank.
    """

    down: PackedLinear | None = None
    """Adapters of the layer, if it has some: to R numbers for queries, for keys and for values, and back."""
    up: PackedLinear
    ones_Q: Tensor

    def for_use(self, config: ModelConfig, weights: Weights, layer: int) -> "SharedAttention":
        """Return the same attention in another layer, with its adapters."""
        assert config.shared is not None
        found = copy(self)
        found.layer = found.layer_of_kind = config.layers_with(range(layer), state=False)
        if config.shared.adapts_attention:
            use, rank = config.shared.layers.index(layer), ShardSlice.whole(config.shared.rank)
            names = [f"linear_{part}_adapter_list.{use}" for part in "qkv"]
            outputs = rows_of(self.rank.part(config.num_heads), self.head_dim)
            downs = {f"{name}.0": rank for name in names}
            found.down = weights.linear(downs, ShardSlice.whole(2 * config.hidden_size), bias=False)
            found.up = self.ops.stack_heads(
                [weights.wide_linear(f"{name}.1", outputs, rank) for name in names]
            )
            found.ones_Q = torch.ones(3 * outputs.size, device=weights.device)
        return found

    def _project(self, x_TE: Tensor) -> Tensor:
        qkv_TQ = super()._project(x_TE)
        if self.down is None:
            return qkv_TQ
        assert self.ops.recurrent is not None
        low_T3R = self.ops.linear(self.down, x_TE).view(len(x_TE), 3, -1)
        adapted_TQ = self.ops.linear_by_head(self.up, low_T3R).flatten(1)
        return self.ops.recurrent.mul_add(qkv_TQ, self.ones_Q, adapted_TQ)


class HeadLayerNormAttention(Attention):
    """Attention whose QK-norm is a LayerNorm of each head, with weights of its own and no bias (Cohere,
    StableLM): a linear takes the mean off, and an RMS norm does the rest.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        width, heads = self.head_dim, self.rank.part(config.num_heads)
        kv_heads = self.rank.layout.kv_heads(config.num_kv_heads)
        norms = [
            self._read(config, weights, "q_norm", heads),
            self._read(config, weights, "k_norm", kv_heads),
        ]
        self.norm_nD = torch.cat(norms)
        if self._order is not None:
            self.norm_nD = self.norm_nD[:, list(self._order)]
        # D I - 1 over a power of two: bfloat16 has these numbers exactly, and norms do not see the factor.
        power = 1 << (width - 1).bit_length()
        center_DD = (width * torch.eye(width) - 1) / power
        packed = ops.pack_router(center_DD.to(weights.device, weights.dtype), None)
        self.center = ops.stack_heads([packed] * len(self.norm_nD))
        self.eps *= (width / power) ** 2

    def _read(self, config: ModelConfig, weights: Weights, name: str, heads: ShardSlice) -> Tensor:
        if config.qk_norm == "layer":
            whole = weights.floats(f"{name}.weight", heads.total, self.head_dim)
        else:
            each = [weights.floats(f"{name}.{head}.weight", self.head_dim) for head in range(heads.total)]
            whole = torch.stack(each)
        return whole[heads.start : heads.stop].to(weights.dtype)

    def _rotate_and_write_kv(self, qkv: Tensor, forward: ForwardContext, plan: AttentionPlan) -> Tensor:
        assert self.norm_nD is not None
        ops, rotated = self.ops, self.heads + self.kv_heads
        qk_TnD = ops.rms_norm(ops.linear_by_head(self.center, qkv[:, :rotated]), self.norm_nD, self.eps)
        qk_TnD = ops.rotary(qk_TnD, *self._angles(forward, self.rope))
        ops.write_kv(*self._cache(forward), qk_TnD[:, self.heads :], qkv[:, rotated:], plan)
        return qk_TnD[:, : self.heads]
