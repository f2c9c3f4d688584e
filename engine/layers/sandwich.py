"""Layers whose attention and MLP stand between two norms each, as Gemma 2 and 3 have them."""

from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config import ModelConfig
from ..weights import Weights
from .attention import Attention
from .forward import Forward
from .layer import MLP
from .norm import norm_weight


class SandwichLayer:
    """A `Layer`. What it gives is normed, so it is summed over the ranks already."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, attention: Attention, mlp: MLP
    ) -> None:
        self.ops = ops
        self.rank = weights.rank
        self.eps = config.rms_norm_eps
        self.attention = attention
        self.mlp = mlp
        self.input_norm_E = norm_weight(config, weights, "input_layernorm", config.hidden_size)
        self.after_attention_E = norm_weight(config, weights, "post_attention_layernorm", config.hidden_size)
        self.before_mlp_E = norm_weight(config, weights, "pre_feedforward_layernorm", config.hidden_size)
        self.after_mlp_E = norm_weight(config, weights, "post_feedforward_layernorm", config.hidden_size)

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.ops.rms_norm(residual_TE, self.input_norm_E, self.eps)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.ops.add_rms_norm(added_TE, residual_TE, self.input_norm_E, self.eps)

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.enter(added_TE, residual_TE)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: Forward) -> Tensor:
        x_TE = self._normed(self.attention(x_TE, forward), self.after_attention_E)
        x_TE = self.ops.add_rms_norm(x_TE, residual_TE, self.before_mlp_E, self.eps)
        return self._normed(self.mlp(x_TE), self.after_mlp_E)

    def complete(self, added_TE: Tensor) -> Tensor:
        return added_TE

    def _normed(self, partial_TE: Tensor, norm_E: Tensor) -> Tensor:
        return self.ops.rms_norm(self.rank.complete(self.ops, partial_TE), norm_E, self.eps)
