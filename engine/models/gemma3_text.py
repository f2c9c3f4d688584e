"""Gemma 3, its language part: as Gemma 2, with normed heads in the place of caps. Layers that slide turn by
angles of their own.
"""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..layers.layer import Layer
from ..layers.mlp import GatedMLP
from ..layers.sandwich import SandwichLayer
from ..model_config import ModelConfig
from ..weights import Source, Weights


def gemma3_text(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return SandwichLayer(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
