"""Layers that norm what attention and MLP give, and nothing before, as OLMo 2 and 3 have them."""

from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config import ModelConfig
from ..weights import Weights
from .attention import Attention
from .forward import Forward
from .layer import MLP


class PostNormLayer:
    """A `Layer` whose attention and MLP read the sum of all before as it is. What it gives is `complete`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, attention: Attention, mlp: MLP
    ) -> None:
        self.ops = ops
        self.rank = weights.rank
        self.eps = config.rms_norm_eps
        self.attention = attention
        self.mlp = mlp
        self.after_attention_E = weights.vector("post_attention_layernorm.weight", config.hidden_size)
        self.after_mlp_E = weights.vector("post_feedforward_layernorm.weight", config.hidden_size)

    def first(self, residual_TE: Tensor) -> Tensor:
        return residual_TE

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        # The norm is not wanted: it comes with the sum, and reads nothing more than that does.
        self.ops.add_rms_norm(added_TE, residual_TE, self.after_attention_E, self.eps)
        return residual_TE

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.enter(added_TE, residual_TE)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: Forward) -> Tensor:
        added_TE = self._normed(self.attention(x_TE, forward), self.after_attention_E)
        return self._normed(self.mlp(self.enter(added_TE, residual_TE)), self.after_mlp_E)

    def complete(self, added_TE: Tensor) -> Tensor:
        return added_TE

    def _normed(self, partial_TE: Tensor, norm_E: Tensor) -> Tensor:
        return self.ops.rms_norm(self.rank.complete(self.ops, partial_TE), norm_E, self.eps)
