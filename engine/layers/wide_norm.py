"""Attention whose queries are normed over all heads of a row together, and keys too, as OLMo 2 and 3 have it.

T rows, H query heads, G kv heads, D head dim. Not for ranks that share a layer: none of them has a whole row.
"""

import torch
from torch import Tensor

from llmbox.kernels.ops import AttentionPlan, Ops

from ..model_config import ModelConfig
from ..weights import Weights
from .attention import Attention
from .forward import Forward


class WideNormAttention(Attention):
    def __init__(self, config: ModelConfig, layer: int, weights: Weights, ops: Ops) -> None:
        super().__init__(config, layer, weights, ops)
        assert self.rank.layout.tp == 1
        self.q_norm = weights.vector("q_norm.weight", self.heads * self.head_dim)
        self.k_norm = weights.vector("k_norm.weight", self.kv_heads * self.head_dim)
        self.both_norms = None
        if self.heads == self.kv_heads:
            self.both_norms = torch.stack((self.q_norm, self.k_norm))

    def _turned_and_written(self, qkv: Tensor, forward: Forward, plan: AttentionPlan) -> Tensor:
        angles = forward.cos_ATD[self.rope], forward.sin_ATD[self.rope]
        q_THD, k_TGD = self._normed(qkv.flatten(1))
        q_THD, k_TGD = self.ops.rotary(q_THD, *angles), self.ops.rotary(k_TGD, *angles)
        values = qkv[:, self.heads + self.kv_heads :]
        self.ops.write_kv(forward.cache, self.layer, k_TGD, values, plan)
        return q_THD

    def _normed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[T, (H + 2 G) D] -> queries and keys. Of one width they are normed at once: two results of one
        operation and shape may be one place in memory.
        """
        tokens, q, k = len(rows), len(self.q_norm), len(self.k_norm)
        if self.both_norms is not None:
            both = rows[:, : q + k].view(tokens, 2, q)
            qk = self.ops.rms_norm(both, self.both_norms, self.eps).view(tokens, -1, self.head_dim)
            return qk[:, : self.heads], qk[:, self.heads :]
        q_TQ = self.ops.rms_norm(rows[:, :q].unsqueeze(1), self.q_norm.unsqueeze(0), self.eps)
        k_TK = self.ops.rms_norm(rows[:, q : q + k].unsqueeze(1), self.k_norm.unsqueeze(0), self.eps)
        return q_TQ.view(tokens, -1, self.head_dim), k_TK.view(tokens, -1, self.head_dim)
