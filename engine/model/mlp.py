from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config.config import ModelConfig
from ..partition import ShardSlice
from ..weights.source import Weights


class GatedMLP:
    """Gated MLP: down(activation(gate(x)) * up(x)); gate and up are one stacked linear."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, inner: int | None = None) -> None:
        """Read the MLP of `inner` rows; None: those of the config's MLPs."""
        self.ops = ops
        self.rank = weights.rank
        self.activation = config.activation
        hidden, ffn = ShardSlice.whole(config.hidden_size), self.rank.part(inner or config.intermediate_size)
        bias = config.mlp_bias
        self.gate_up = weights.linear({"gate_proj": ffn, "up_proj": ffn}, hidden, bias=bias)
        self.down = weights.linear({"down_proj": hidden}, ffn, bias=bias)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return partial results for `TensorParallel.add_rms_norm`, [T, E]."""
        return self.rank.row_parallel_linear(self.ops, self.down, self.inner(x_TE), x_TE.shape[1])

    def inner(self, x_TE: Tensor) -> Tensor:
        """Return the input of `down`, this rank's [T, F]."""
        return self.ops.gate_mul(self.ops.linear(self.gate_up, x_TE), self.activation)
