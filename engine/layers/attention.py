"""Attention over the paged KV cache.

T rows, E hidden, H query heads, G kv heads (of this rank), D head dim, n = H + G heads that are rotated.
"""

import torch
from torch import Tensor

from llmbox.kernels.ops import AttentionPlan, Ops

from ..model_config import ModelConfig
from ..parallel.layout import Part
from ..weights import Weights
from .forward import Forward
from .norm import norm_weight


class Attention:
    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        self.rank = rank = weights.rank
        self.ops = ops
        self.layer = layer - rank.layout.layers(config.num_layers).start
        """In the KV cache, which holds the layers of this stage."""
        heads, kv_heads = rank.part(config.num_heads), rank.layout.kv_heads(config.num_kv_heads)
        self.heads, self.kv_heads, self.head_dim = heads.size, kv_heads.size, config.head_dim
        self.scale = config.scales.attention or config.head_dim**-0.5
        self.softcap = config.scales.attention_cap
        self.eps = config.rms_norm_eps
        self.window = config.windows[layer]
        self.rope = config.layer_ropes[layer]
        """Which of the model's tables of angles."""
        self._order = config.ropes[self.rope].order(config.head_dim)
        q, kv = rows_of(heads, self.head_dim), rows_of(kv_heads, self.head_dim)
        self.qkv = weights.linear(
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            Part.whole(config.hidden_size),
            bias=config.qkv_bias,
            order=self._order and self._rows_in_order(self._order),
        )
        self.norm_nD = self._qk_norm(config, weights) if config.qk_norm == "heads" else None
        self.output = weights.linear({"o_proj": Part.whole(config.hidden_size)}, q, bias=config.o_bias)

    def _rows_in_order(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """Of queries and keys; values stay as they are."""
        heads, width = self.heads + self.kv_heads, self.head_dim
        turned = [head * width + dim for head in range(heads) for dim in order]
        return (*turned, *range(heads * width, (heads + self.kv_heads) * width))

    def _qk_norm(self, config: ModelConfig, weights: Weights) -> Tensor:
        """One weight row a head: queries and keys are normed in one operation."""
        q_D = norm_weight(config, weights, "q_norm", self.head_dim)
        k_D = norm_weight(config, weights, "k_norm", self.head_dim)
        if self._order is not None:
            q_D, k_D = q_D[list(self._order)], k_D[list(self._order)]
        return torch.cat((q_D.expand(self.heads, -1), k_D.expand(self.kv_heads, -1)))

    def __call__(self, x_TE: Tensor, forward: Forward) -> Tensor:
        """What `Rank.add_norm` takes."""
        ops, plan = self.ops, forward.plans[self.window]
        qkv = ops.linear(self.qkv, x_TE).view(len(x_TE), -1, self.head_dim)
        q_THD = self._turned_and_written(qkv, forward, plan)
        out = ops.attention(q_THD, forward.cache, self.layer, plan, self.scale, self.softcap)
        return self.rank.partial(ops, self.output, out, x_TE.shape[1])

    def _turned_and_written(self, qkv: Tensor, forward: Forward, plan: AttentionPlan) -> Tensor:
        """Queries, after keys and values are in the cache: [T, H + 2 G, D] -> [T, H, D]."""
        ops, rotated = self.ops, self.heads + self.kv_heads
        angles = forward.cos_ATD[self.rope], forward.sin_ATD[self.rope]
        if ops.rotate_and_write is not None:
            norm_nD, cache = self.norm_nD, forward.cache
            qk_TnD = ops.rotate_and_write(qkv, norm_nD, self.eps, *angles, cache, self.layer, plan)
        else:
            qk_TnD = qkv[:, :rotated]
            if self.norm_nD is not None:
                qk_TnD = ops.rms_norm(qk_TnD, self.norm_nD, self.eps)
            qk_TnD = ops.rotary(qk_TnD, *angles)
            ops.write_kv(forward.cache, self.layer, qk_TnD[:, self.heads :], qkv[:, rotated:], plan)
        return qk_TnD[:, : self.heads]


def rows_of(heads: Part, head_dim: int) -> Part:
    return Part(heads.total * head_dim, heads.start * head_dim, heads.stop * head_dim)
