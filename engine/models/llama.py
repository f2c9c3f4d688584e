"""Llama 2, 3, 3.1, 3.2, 3.3: biases only where config.json asks for them."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..layers.layer import Layer, PreNormLayer
from ..layers.mlp import GatedMLP
from ..model_config import ModelConfig
from ..weights import Source, Weights


def llama(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormLayer(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
