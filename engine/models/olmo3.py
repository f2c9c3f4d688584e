"""OLMo 3: OLMo 2 with windows on three of four layers, which turn by angles of their own."""

from ..model.attention import FullWidthQKNormAttention
from ..model.blocks import DecoderBlock, PostNormBlock
from ..model.decoder import Decoder
from ..model.mlp import GatedMLP
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource


def olmo3(config: ModelConfig, source: WeightSource) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> DecoderBlock:
        attention = FullWidthQKNormAttention(config, number, weights.at("self_attn"), ops)
        return PostNormBlock(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
