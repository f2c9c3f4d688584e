"""Qwen2 and Qwen2.5: biases on q, k and v only; windows on the layers that config.json names."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..model_config import ModelConfig
from ..weights import Source, Weights


def qwen2(config: ModelConfig, source: Source) -> Decoder:
    def attention(layer: int, weights: Weights) -> Attention:
        return Attention(config, layer, weights, source.ops)

    return Decoder(config, source, attention)
