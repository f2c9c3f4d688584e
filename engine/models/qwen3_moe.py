"""Qwen3-MoE: Qwen3 with experts in the place of MLPs, in the layers that config.json names."""

from ..model.attention import Attention
from ..model.blocks import MLP, DecoderBlock, PreNormBlock
from ..model.decoder import Decoder
from ..model.mlp import GatedMLP
from ..model.moe import ExpertNames, SparseMoE
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource


def qwen3_moe(config: ModelConfig, source: WeightSource) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> DecoderBlock:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormBlock(config, weights, ops, attention, mlp(number, weights.at("mlp")))

    def mlp(number: int, weights: Weights) -> MLP:
        if config.experts is None or not config.experts.layers[number]:
            return GatedMLP(config, weights, ops)
        return SparseMoE(config.experts, config.hidden_size, weights, ops, ExpertNames())

    return Decoder(config, source, layer)
