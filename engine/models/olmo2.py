"""OLMo 2: norms behind attention and MLP, and over all heads of queries and keys."""

from ..layers.decoder import Decoder
from ..layers.layer import Layer
from ..layers.mlp import GatedMLP
from ..layers.post_norm import PostNormLayer
from ..layers.wide_norm import WideNormAttention
from ..model_config import ModelConfig
from ..weights import Source, Weights


def olmo2(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        attention = WideNormAttention(config, number, weights.at("self_attn"), ops)
        return PostNormLayer(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
