"""Gemma: Llama with a scaled embedding, norms by 1 + w and gates by GELU."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..layers.layer import Layer, PreNormLayer
from ..layers.mlp import GatedMLP
from ..model_config import ModelConfig
from ..weights import Source, Weights


def gemma(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormLayer(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
