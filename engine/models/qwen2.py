"""Qwen2 and Qwen2.5: biases on q, k and v only; windows on the layers that config.json names."""

from ..model.attention import Attention
from ..model.blocks import DecoderBlock, PreNormBlock
from ..model.decoder import Decoder
from ..model.mlp import GatedMLP
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource


def qwen2(config: ModelConfig, source: WeightSource) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> DecoderBlock:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormBlock(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
