"""OLMo 3: OLMo 2 with windows on three of four layers, which turn by angles of their own."""

from ..layers.decoder import Decoder
from ..layers.layer import Layer
from ..layers.mlp import GatedMLP
from ..layers.post_norm import PostNormLayer
from ..layers.wide_norm import WideNormAttention
from ..model_config import ModelConfig
from ..weights import Source, Weights


def olmo3(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        attention = WideNormAttention(config, number, weights.at("self_attn"), ops)
        return PostNormLayer(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
