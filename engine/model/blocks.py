"""What a decoder asks of its layers, and the layer that most architectures have.

T rows of the step, E hidden. Between layers a row is two parts: the sum of what all layers have added so far,
which grows in place, and what the last one has yet to add. So the next norm can add and norm at once.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config.config import ModelConfig
from ..weights.source import Weights
from .attention import Attention
from .forward_context import ForwardContext
from .norm import norm_weight

MLP = Callable[[Tensor], Tensor]
"""From the layer's rows to what `Rank.add_norm` takes."""


class DecoderBlock(Protocol):
    """Layers of one model are of one class: each takes from `added_TE` what the one before gave."""

    def first(self, residual_TE: Tensor) -> Tensor:
        """X of `__call__`, where nothing is to be added."""
        ...

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """X of `__call__`, from what the layer before gave, which is added to `residual_TE` in place."""
        ...

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """As `enter`, of what is `complete`."""
        ...

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        """What is yet to be added to `residual_TE`, which has grown by the attention's part."""
        ...

    def complete(self, added_TE: Tensor) -> Tensor:
        """What `__call__` gave, as one rank alone would have it."""
        ...


class PreNormBlock:
    """Rows are normed before attention and MLP."""

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, attention: Attention, mlp: MLP
    ) -> None:
        self.ops = ops
        self.rank = weights.rank
        self.eps = config.rms_norm_eps
        self.attention = attention
        self.mlp = mlp
        self.input_norm_E = norm_weight(config, weights, "input_layernorm", config.hidden_size)
        self.post_norm_E = norm_weight(config, weights, "post_attention_layernorm", config.hidden_size)

    def first(self, residual_TE: Tensor) -> Tensor:
        return self.ops.rms_norm(residual_TE, self.input_norm_E, self.eps)

    def enter(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.rank.add_norm(self.ops, added_TE, residual_TE, self.input_norm_E, self.eps)

    def resume(self, added_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return self.ops.add_rms_norm(added_TE, residual_TE, self.input_norm_E, self.eps)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        x_TE = self.attention(x_TE, forward)
        return self.mlp(self.rank.add_norm(self.ops, x_TE, residual_TE, self.post_norm_E, self.eps))

    def complete(self, added_TE: Tensor) -> Tensor:
        return self.rank.complete(self.ops, added_TE)


class PostNormBlock:
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

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        added_TE = self._normed(self.attention(x_TE, forward), self.after_attention_E)
        return self._normed(self.mlp(self.enter(added_TE, residual_TE)), self.after_mlp_E)

    def complete(self, added_TE: Tensor) -> Tensor:
        return added_TE

    def _normed(self, partial_TE: Tensor, norm_E: Tensor) -> Tensor:
        return self.ops.rms_norm(self.rank.complete(self.ops, partial_TE), norm_E, self.eps)


class SandwichNormBlock:
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

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: ForwardContext) -> Tensor:
        x_TE = self._normed(self.attention(x_TE, forward), self.after_attention_E)
        x_TE = self.ops.add_rms_norm(x_TE, residual_TE, self.before_mlp_E, self.eps)
        return self._normed(self.mlp(x_TE), self.after_mlp_E)

    def complete(self, added_TE: Tensor) -> Tensor:
        return added_TE

    def _normed(self, partial_TE: Tensor, norm_E: Tensor) -> Tensor:
        return self.ops.rms_norm(self.rank.complete(self.ops, partial_TE), norm_E, self.eps)
