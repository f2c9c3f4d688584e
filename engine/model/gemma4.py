"""Layers of Gemma 4: normed values, keys and values that layers share, and embeddings of each layer.

T rows, E hidden, P width of a layer's own embedding, L layers of the model, H query heads and G kv heads of
this rank, D head dim.
"""

from dataclasses import replace

import torch
from torch import Tensor

from llmbox.kernels.ops import AttentionPlan, Ops, PackedLinear

from ..model_config.config import ModelConfig
from ..partition import ShardSlice
from ..weights.source import Weights, norm_weight
from .attention import Attention
from .blocks import SandwichNormBlock
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
    """Experts that read the residual, beside an MLP, with norms of their own before and behind."""

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
