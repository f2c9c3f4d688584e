"""Llama 2, 3, 3.1, 3.2, 3.3: biases only where config.json asks for them."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..model_config import ModelConfig
from ..weights import Source, Weights


def llama(config: ModelConfig, source: Source) -> Decoder:
    def attention(layer: int, weights: Weights) -> Attention:
        return Attention(config, layer, weights, source.ops)

    return Decoder(config, source, attention)
