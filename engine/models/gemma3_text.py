"""Gemma 3, its language part: as Gemma 2, with normed heads in the place of caps. Layers that slide turn by
angles of their own.
"""

from ..model.attention import Attention
from ..model.blocks import DecoderBlock, SandwichNormBlock
from ..model.decoder import Decoder
from ..model.mlp import GatedMLP
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource


def gemma3_text(config: ModelConfig, source: WeightSource) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> DecoderBlock:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return SandwichNormBlock(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
