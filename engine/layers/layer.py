"""What a decoder asks of its layers, and the layer that most architectures have.

T rows of the step, E hidden. Between layers a row is two parts: the sum of what all layers have added so far,
which grows in place, and what the last one has yet to add. So the next norm can add and norm at once.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config import ModelConfig
from ..weights import Weights
from .attention import Attention
from .forward import Forward
from .norm import norm_weight

MLP = Callable[[Tensor], Tensor]
"""From the layer's rows to what `Rank.add_norm` takes."""


class Layer(Protocol):
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

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: Forward) -> Tensor:
        """What is yet to be added to `residual_TE`, which has grown by the attention's part."""
        ...

    def complete(self, added_TE: Tensor) -> Tensor:
        """What `__call__` gave, as one rank alone would have it."""
        ...


class PreNormLayer:
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

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: Forward) -> Tensor:
        x_TE = self.attention(x_TE, forward)
        return self.mlp(self.rank.add_norm(self.ops, x_TE, residual_TE, self.post_norm_E, self.eps))

    def complete(self, added_TE: Tensor) -> Tensor:
        return self.rank.complete(self.ops, added_TE)
