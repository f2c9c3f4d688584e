"""The skeleton that all architectures here share: embedding, pre-norm layers, norm, head.

T rows of the step, R rows whose logits are wanted, E hidden, V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor

from llmbox.kernels.ops import Ops

from ..model_config import ModelConfig
from ..weights import Source, Weights
from .attention import Attention
from .forward import Forward
from .mlp import GatedMLP

MakeAttention = Callable[[int, Weights], Attention]


class DecoderLayer:
    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, ops: Ops, make_attention: MakeAttention
    ) -> None:
        self.ops = ops
        self.eps = config.rms_norm_eps
        self.input_norm_E = weights.vector("input_layernorm.weight", config.hidden_size)
        self.attention = make_attention(layer, weights.at("self_attn"))
        self.post_norm_E = weights.vector("post_attention_layernorm.weight", config.hidden_size)
        self.mlp = GatedMLP(config, weights.at("mlp"), ops)

    def __call__(self, x_TE: Tensor, residual_TE: Tensor, forward: Forward) -> Tensor:
        """X is this layer's input, normed; the sum of all layers so far grows in `residual_TE`, in place.

        What is returned has yet to be added to it: the next norm does both at once.
        """
        x_TE = self.attention(x_TE, forward)
        return self.mlp(self.ops.add_rms_norm(x_TE, residual_TE, self.post_norm_E, self.eps))


class Decoder:
    """Takes every tensor of the checkpoint from `source`, or raises ModelError."""

    def __init__(self, config: ModelConfig, source: Source, make_attention: MakeAttention) -> None:
        self.config = config
        self.ops = ops = source.ops
        weights = Weights(source)
        sizes = config.vocab_size, config.hidden_size
        self.table = weights.embedding("model.embed_tokens", *sizes, tied=config.tie_word_embeddings)
        self.layers = [
            DecoderLayer(config, i, weights.at(f"model.layers.{i}"), ops, make_attention)
            for i in range(config.num_layers)
        ]
        self.norm_E = weights.vector("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            source.skip("lm_head.weight")
            self.head = self.table
        else:
            self.head = weights.head("lm_head", *sizes)
        source.finish()
        self._run_layers = ops.graph(self._layers)

    def hidden(self, forward: Forward, rows_R: Tensor | None) -> Tensor:
        """Final normed states [R, E] of the wanted rows (None: all) after writing KV for every row."""
        x_TE, residual_TE = self._run_layers(forward)
        if rows_R is not None:
            x_TE, residual_TE = x_TE[rows_R], residual_TE[rows_R]
        return self.ops.add_rms_norm(x_TE, residual_TE, self.norm_E, self.config.rms_norm_eps)

    def _layers(self, forward: Forward) -> tuple[Tensor, Tensor]:
        """What the last layer adds and the sum of all before it, [T, E] each."""
        ops, eps = self.ops, self.config.rms_norm_eps
        residual_TE = ops.embedding(self.table, forward.ids_T)
        x_TE = ops.rms_norm(residual_TE, self.layers[0].input_norm_E, eps)
        for layer, after in zip(self.layers, self.layers[1:], strict=False):
            x_TE = layer(x_TE, residual_TE, forward)
            x_TE = ops.add_rms_norm(x_TE, residual_TE, after.input_norm_E, eps)
        return self.layers[-1](x_TE, residual_TE, forward), residual_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V] in float32 or the model's dtype."""
        return self.ops.logits(self.head, hidden_RE)
