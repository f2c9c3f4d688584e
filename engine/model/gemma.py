"""Layers of Gemma 4 and Gemma 3n.

Gemma 4 has normed values, keys and values that layers share, and embeddings of each layer. In Gemma 3n rows
have several streams (AltUp), the residual is augmented (LAuReL), and few gates stay.

T rows, E hidden, P width of a layer's own embedding, L layers of the model, H query heads and G kv heads of
this rank, D head dim, N streams of a row, F rows of the MLP on this rank.
"""

from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor

from llmbox.kernels.op_types import AltUpOps
from llmbox.kernels.ops import AttentionPlan, Ops, PackedLinear

from ..checkpoint.safetensors import ShardSlice
from ..model_config.config import ModelConfig
from ..weights.source import Weights, norm_weight
from .attention import Attention
from .blocks import DecoderBlock, SandwichNormBlock
from .forward_context import ForwardContext
from .mlp import GatedMLP, SparseMoE


class NormedValueAttention(Attention):
    """Attention that norms queries, keys and values. A layer that shares keys and values has only queries."""

    def _make_norms(self, config: ModelConfig, weights: Weights) -> Tensor:
        """Return one norm weight for each head of `qkv`."""
        rows = [norm_weight(config, weights, "q_norm", self.head_dim).expand(self.heads, -1)]
        if self.writes_kv:
            k_D = norm_weight(config, weights, "k_norm", self.head_dim)
            rows.append(k_D.expand(self.kv_heads, -1))
            self.no_weight_GD = torch.ones_like(k_D).expand(self.kv_heads, -1).contiguous()
            if self.has_values:
                rows.append(self.no_weight_GD)
        return torch.cat(rows)

    def _rotate_and_write_kv(self, qkv: Tensor, forward: ForwardContext, plan: AttentionPlan) -> Tensor:
        ops, rotated = self.ops, self.heads + self.kv_heads * self.writes_kv
        assert self.norm_nD is not None
        normed_TnD = ops.rms_norm(qkv, self.norm_nD, self.eps)
        qk_TnD = ops.rotary(normed_TnD[:, :rotated], *self._angles(forward, self.rope))
        if self.writes_kv:
            if self.has_values:
                v_TGD = normed_TnD[:, rotated:]
            else:
                v_TGD = ops.rms_norm(qkv[:, self.heads :], self.no_weight_GD, self.eps)
            ops.write_kv(*self._cache(forward), qk_TnD[:, self.heads :], v_TGD, plan)
        return qk_TnD[:, : self.heads]


class ExpertsBesideMLP:
    """Experts that read the residual, beside an MLP, with separate norms before and after."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        assert config.experts is not None
        self.ops = ops
        self.rank = weights.rank
        self.eps, hidden = config.rms_norm_eps, config.hidden_size
        self.experts = SparseMoE(config, replace(config.experts, shared_inner=0), weights, ops)
        self.after_mlp_E = norm_weight(config, weights, "post_feedforward_layernorm_1", hidden)
        self.before_experts_E = norm_weight(config, weights, "pre_feedforward_layernorm_2", hidden)
        self.after_experts_E = norm_weight(config, weights, "post_feedforward_layernorm_2", hidden)
        self.before_router_E = weights.floats("router.scale", hidden) * hidden**-0.5

    def __call__(self, mlp_TE: Tensor, residual_TE: Tensor, norm_E: Tensor) -> Tensor:
        """Return the normed sum of the MLP's result, which is `complete`, and the experts'."""
        ops, eps, width = self.ops, self.eps, mlp_TE.shape[1]
        normed_TE = ops.rms_norm(mlp_TE, self.after_mlp_E, eps)
        # A copy: the next norm may reuse the memory of this one's result.
        mlp_TE = ops.concat([normed_TE.view(-1, 1, width)]).view(-1, width)
        logits_TX = ops.logits(self.experts.router, ops.rms_norm(residual_TE, self.before_router_E, eps))
        rows_TE = ops.rms_norm(residual_TE, self.before_experts_E, eps)
        sparse_TE = self.rank.finish_all_reduce(ops, self.experts.mix(rows_TE, logits_TX))
        sparse_TE = ops.rms_norm(sparse_TE, self.after_experts_E, eps)
        return ops.add_rms_norm(sparse_TE, mlp_TE, norm_E, eps)


class Gemma4Block(SandwichNormBlock):
    """Sandwich norms, then the layer's own embedding, and the sum times a scalar of the layer."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, ops: Ops, attention: Attention
    ) -> None:
        mlp = GatedMLP(config, weights.at("mlp"), ops, config.sizes_of(layer).inner)
        super().__init__(config, weights, ops, attention, mlp)
        self.experts = ExpertsBesideMLP(config, weights, ops) if config.experts else None
        self.own = OwnEmbedding(config, layer, weights, ops) if config.per_layer_width else None
        self.scalar = float(weights.floats("layer_scalar", 1))
        last_E = self.after_mlp_E if self.own is None else self.own.norm_E
        self.last_norm_E = last_E if self.scalar == 1.0 else last_E.float() * self.scalar

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        ops = self.ops
        x_TE = self._norm(self.attention(x_TE, forward), self.after_attention_E)
        x_TE = self.before_mlp.add_rms_norm(x_TE, residual_TE, self.before_mlp_E, self.eps)
        norm_E = self.after_mlp_E if self.own is not None else self.last_norm_E
        x_TE = self.mlp(x_TE)
        if self.experts is None:
            x_TE = self._norm(x_TE, norm_E)
        else:
            x_TE = self.experts(self.rank.finish_all_reduce(ops, x_TE), residual_TE, norm_E)
        if self.own is not None:
            # Only the addition is needed: the norm comes with it.
            ops.add_rms_norm(x_TE, residual_TE, self.before_mlp_E, self.eps)
            x_TE = ops.rms_norm(self.own(residual_TE, forward), self.last_norm_E, self.eps)
        if self.scalar != 1.0:
            ops.scale(residual_TE, self.scalar)
        return x_TE


class OwnEmbedding:
    """Embedding of one layer (PLE): projection(gelu(gate(x)) * the layer's part of
    `ForwardContext.own_TLP`).
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        self.ops = ops
        self.layer = layer
        self.activation = config.activation
        hidden, width = ShardSlice.whole(config.hidden_size), ShardSlice.whole(config.per_layer_width)
        self.gate = weights.linear({"per_layer_input_gate": width}, hidden, bias=False)
        self.projection = weights.linear({"per_layer_projection": hidden}, width, bias=False)
        self.norm_E = norm_weight(config, weights, "post_per_layer_input_norm", config.hidden_size)

    def __call__(self, x_TE: Tensor, forward: ForwardContext) -> Tensor:
        """Return the projection, not normed yet, [T, E]."""
        ops, own_TLP = self.ops, forward.own_TLP
        assert own_TLP is not None
        gate_T1P = ops.linear(self.gate, x_TE).unsqueeze(1)
        pair = ops.concat([gate_T1P, own_TLP[:, self.layer : self.layer + 1]]).flatten(1)
        return ops.linear(self.projection, ops.gate_mul(pair, self.activation))


class OwnEmbeddings:
    """Embeddings of all layers: a row of a table, and a projection of the token's embedding."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, vocab: ShardSlice) -> None:
        """`vocab`: this rank's rows of the embedding. The table may have fewer: rows beyond it are zeros."""
        self.ops = ops
        self.layers, self.width = config.num_layers, config.per_layer_width
        known = config.per_layer_vocab
        start, stop = min(vocab.start, known), min(vocab.stop, known)
        rows = ShardSlice(known, start, stop, vocab.size - (stop - start))
        row = config.per_layer_row
        self.table: PackedLinear = weights.embedding("model.embed_tokens_per_layer", rows, row, tied=False)
        whole = ShardSlice.whole(config.hidden_size)
        self.projection = weights.linear(
            {"model.per_layer_model_projection": ShardSlice.whole(row)}, whole, bias=False
        )
        # Both are divided by the square root of 2. The projection is first divided by that of E, which
        # changes the epsilon of its norm alone.
        norm_P = norm_weight(config, weights, "model.per_layer_projection_norm", self.width)
        self.norm_LP = (norm_P.float() * 0.5**0.5).expand(self.layers, -1).contiguous()
        self.eps = config.rms_norm_eps * config.hidden_size
        self.scale = (self.width / 2) ** 0.5

    def look_up(self, ids_T: Tensor) -> Tensor:
        return self.ops.embedding(self.table, ids_T, self.scale)

    def add_projection(self, rows: Tensor, x_TE: Tensor) -> Tensor:
        """Add the projection of `x_TE` to the rows of the table, [T, L P] -> [T, L, P]."""
        ops, shape = self.ops, (-1, self.layers, self.width)
        projected_TLP = ops.rms_norm(ops.linear(self.projection, x_TE).view(shape), self.norm_LP, self.eps)
        # Only the addition is needed: the norm comes with it.
        ops.add_rms_norm(projected_TLP.flatten(1), rows, self.norm_LP.flatten(), self.eps)
        return rows.view(shape)


HALF = 0.5**0.5
LEAST_SQUARE = 1e-5
"""Least mean square of a projection, as in transformers."""


class FewGatesMLP(GatedMLP):
    """MLP that keeps only gates above mean + factor * deviation, less that threshold."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        sizes = config.sizes_of(layer)
        super().__init__(config, weights, ops, sizes.inner)
        self.width = sizes.inner
        self.factor = 0.0
        if sizes.sparsity:
            self.factor = NormalDist().inv_cdf(sizes.sparsity)
        self.is_sparse = sizes.sparsity > 0

    def inner(self, x_TE: Tensor) -> Tensor:
        if not self.is_sparse:
            return super().inner(x_TE)
        ops, altup = self.ops, operations(self.ops)
        gate_up = ops.linear(self.gate_up, x_TE)
        gate_TF = gate_up[:, : gate_up.shape[1] // 2]
        sums_T2 = altup.gate_sums(gate_TF)
        if self.rank.layout.tp > 1:
            ops.host_callback(self.rank.communicator.all_reduce, (sums_T2,))
        altup.cut_gates(gate_TF, sums_T2, self.width, self.factor)
        return ops.gate_mul(gate_up, self.activation)


class Router:
    """Coefficients of streams: linear(norm(x) / E), and a small matrix by which the tanh of that counts."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        assert config.altup is not None
        self.ops, self.eps = ops, config.rms_norm_eps
        streams, hidden = config.altup.streams, config.hidden_size
        self.norm_E = norm_weight(config, weights, "router_norm", hidden).float() / hidden
        self.linear = weights.router("modality_router", ShardSlice.whole(streams), ShardSlice.whole(hidden))
        self.prediction = weights.floats("prediction_coefs.weight", streams**2, streams)
        self.correction = weights.floats("correction_coefs.weight", streams, streams)


class AltUpBlock(DecoderBlock):
    """Layer that sends one stream through attention and MLP, and predicts and corrects all of them.

    Input and output of `__call__` are all streams [T, N E]; there is no residual beside them.
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, ops: Ops, attention: Attention
    ) -> None:
        assert config.altup is not None
        super().__init__(config, weights, ops, attention, FewGatesMLP(config, layer, weights.at("mlp"), ops))
        assert ops.recurrent is not None
        self.altup, self.mul_add = operations(ops), ops.recurrent.mul_add
        self.active = config.altup.active
        hidden, rank = config.hidden_size, ShardSlice.whole(config.altup.laurel_rank)
        self.hidden = hidden
        self.router = Router(config, weights.at("altup"), ops)
        self.input_norm_E = norm_weight(config, weights, "input_layernorm", hidden)
        self.before_mlp_E = norm_weight(config, weights, "pre_feedforward_layernorm", hidden)
        self.after_mlp_E = norm_weight(config, weights, "post_feedforward_layernorm", hidden)
        # The sum of these two and of the stream before them is divided by the square root of 2.
        self.after_attention_E = (
            HALF * norm_weight(config, weights, "post_attention_layernorm", hidden).float()
        )
        laurel, whole = weights.at("laurel"), ShardSlice.whole(hidden)
        self.left = laurel.linear({"linear_left": rank}, whole, bias=False)
        self.right = laurel.linear({"linear_right": whole}, rank, bias=False)
        self.after_laurel_E = HALF * norm_weight(config, laurel, "post_laurel_norm", hidden).float()
        self.half_E = torch.full((hidden,), HALF)
        scale_E = weights.floats("altup.correct_output_scale", hidden)
        self.output_scale_E = scale_E if config.altup.scales_output else None
        self.own = OwnEmbedding(config, layer, weights, ops)

    def first(self, residual_TE: Tensor) -> Tensor:
        return residual_TE

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:  # noqa: ARG002
        return added_TE

    def complete(self, added_TE: Tensor) -> Tensor:
        return added_TE

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:  # noqa: ARG002
        ops, router, eps = self.ops, self.router, self.eps
        routed_TN = ops.logits(router.linear, ops.rms_norm(self._active(x_TE), router.norm_E, eps))
        predicted = self.altup.predict(x_TE, routed_TN, router.prediction)
        normed_TE = ops.rms_norm(self._active(predicted), self.input_norm_E, eps)
        # A copy: norms inside attention may take its place.
        normed_TE = ops.concat([normed_TE.unsqueeze(1)]).flatten(1)
        row_TE = self._add_laurel(self._active(predicted), normed_TE)
        added_TE = self._norm(self.attention(normed_TE, forward), self.after_attention_E)
        added_TE = self.mlp(ops.add_rms_norm(added_TE, row_TE, self.before_mlp_E, eps))
        added_TE = self._norm(added_TE, self.after_mlp_E)
        routed_TN = ops.logits(router.linear, ops.add_rms_norm(added_TE, row_TE, router.norm_E, eps))
        streams = self.altup.correct(predicted, row_TE, self.active, routed_TN, router.correction)
        own_TE = self._active(streams)
        if self.output_scale_E is not None:
            own_TE = self.mul_add(own_TE, self.output_scale_E, None)
        own_TE = ops.rms_norm(self.own(own_TE, forward), self.own.norm_E, eps)
        self.altup.add_to_others(streams, own_TE)
        return streams

    def _add_laurel(self, active_TE: Tensor, normed_TE: Tensor) -> Tensor:
        """Return (active + normed + laurel(normed)) / sqrt(2)."""
        ops, by_E = self.ops, self.half_E
        row_TE = self.mul_add(normed_TE, by_E, self.mul_add(active_TE, by_E, None))
        laurel_TE = ops.linear(self.right, ops.linear(self.left, normed_TE))
        laurel_TE = ops.rms_norm(laurel_TE, self.after_laurel_E, self.eps)
        # Only the addition is needed: the norm comes with it.
        ops.add_rms_norm(laurel_TE, row_TE, self.before_mlp_E, self.eps)
        return row_TE

    def _active(self, streams: Tensor) -> Tensor:
        start = self.active * self.hidden
        return streams[:, start : start + self.hidden]

    def _norm(self, partial_TE: Tensor, norm_E: Tensor) -> Tensor:
        return self.ops.rms_norm(self.rank.finish_all_reduce(self.ops, partial_TE), norm_E, self.eps)


class AltUpStreams:
    """Streams before the first layer, and their merge into one row after the last."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        assert config.altup is not None
        assert ops.recurrent is not None
        self.ops, self.altup, self.mul_add = ops, operations(ops), ops.recurrent.mul_add
        self.hidden, self.streams = config.hidden_size, config.altup.streams
        whole, others = ShardSlice.whole(self.hidden), range(self.streams - 1)
        self.expansion = weights.linear(
            {f"model.altup_projections.{stream}": whole for stream in others}, whole, bias=False
        )
        self.contractions = [
            weights.linear({f"model.altup_unembed_projections.{stream}": whole}, whole, bias=False)
            for stream in others
        ]
        self.share_E = torch.full((self.hidden,), 1 / self.streams)

    def expand(self, x_TE: Tensor) -> Tensor:
        """Return streams of an embedding: the row, and its projections in its size."""
        others = self.ops.linear(self.expansion, x_TE)
        self.altup.match_size(others, x_TE, LEAST_SQUARE)
        return self.ops.concat([x_TE.unsqueeze(1), others.unsqueeze(1)]).flatten(1)

    def contract(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return two parts of the mean of the first stream and the projections of others in its size."""
        ops, width = self.ops, self.hidden
        first_TE = streams[:, :width]
        sum_TE = self.mul_add(first_TE, self.share_E, None)
        for number, linear in enumerate(self.contractions, 1):
            x_TE = ops.linear(linear, streams[:, number * width : (number + 1) * width])
            self.altup.match_size(x_TE, first_TE, LEAST_SQUARE)
            if number < self.streams - 1:
                sum_TE = self.mul_add(x_TE, self.share_E, sum_TE)
        return ops.scale(x_TE, 1 / self.streams), sum_TE


def operations(ops: Ops) -> AltUpOps:
    assert ops.altup is not None
    return ops.altup
