"""Mixture-of-experts (MoE) layer in place of an MLP.

T rows, E hidden, X experts.
"""

from torch import Tensor

from llmbox.kernels.op_types import Mixture
from llmbox.kernels.ops import Ops

from ..model_config.moe import ExpertsConfig
from ..partition import ShardSlice
from ..weights.source import Weights


class SparseMoE:
    """Top-k routing: each row passes through its k best experts, weighted by their router probabilities.

    With tensor parallelism each rank has a slice of every expert's intermediate rows, as of an MLP's.
    """

    def __init__(self, config: ExpertsConfig, hidden: int, weights: Weights, ops: Ops) -> None:
        self.ops = ops
        self.rank = weights.rank
        whole, inner = ShardSlice.whole(hidden), self.rank.part(config.inner)
        self.router = weights.router("gate", ShardSlice.whole(config.count), whole)
        every = [f"experts.{expert}" for expert in range(config.count)]
        stacked = ops.pack_experts is not None
        groups = [every] if stacked else [[name] for name in every]
        gate, up, down = config.projections
        gate_ups, downs = [], []
        for group in groups:
            rows = {f"{name}.{part}": inner for name in group for part in (gate, up)}
            gate_ups.append(weights.linear(rows, whole, bias=False, experts=stacked))
            rows = {f"{name}.{down}": whole for name in group}
            downs.append(weights.linear(rows, inner, bias=False, experts=stacked))
        self.mixture = Mixture(gate_ups, downs, config.count, config.per_token, config.normalised)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return partial results for `TensorParallel.add_rms_norm`, [T, E]."""
        logits_TX = self.ops.logits(self.router, x_TE)
        return self.rank.reduce_partial(self.ops, self.ops.experts(self.mixture, x_TE, logits_TX))
