"""Granite 3: Llama with numbers that embedding, scores, sums and logits are multiplied with (`Scales`)."""

from ..model.attention import Attention
from ..model.blocks import DecoderBlock, PreNormBlock
from ..model.decoder import Decoder
from ..model.mlp import GatedMLP
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource


def granite(config: ModelConfig, source: WeightSource) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> DecoderBlock:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormBlock(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
