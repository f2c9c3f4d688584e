"""Qwen3 (dense): every query and key head is normed before it is rotated."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..model_config import ModelConfig
from ..weights import Source, Weights


def qwen3(config: ModelConfig, source: Source) -> Decoder:
    def attention(layer: int, weights: Weights) -> Attention:
        return Attention(config, layer, weights, source.ops, qk_norm=True)

    return Decoder(config, source, attention)
