"""Mistral: Llama without biases; where config.json has a window, every layer slides."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..model_config import ModelConfig
from ..weights import Source, Weights


def mistral(config: ModelConfig, source: Source) -> Decoder:
    def attention(layer: int, weights: Weights) -> Attention:
        return Attention(config, layer, weights, source.ops)

    return Decoder(config, source, attention)
