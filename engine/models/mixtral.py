"""Mixtral: Mistral with experts in the place of every MLP."""

from ..model.attention import Attention
from ..model.blocks import DecoderBlock, PreNormBlock
from ..model.decoder import Decoder
from ..model.moe import ExpertNames, SparseMoE
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource

NAMES = ExpertNames("w1", "w3", "w2")


def mixtral(config: ModelConfig, source: WeightSource) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> DecoderBlock:
        assert config.experts is not None
        attention = Attention(config, number, weights.at("self_attn"), ops)
        experts = SparseMoE(config.experts, config.hidden_size, weights.at("block_sparse_moe"), ops, NAMES)
        return PreNormBlock(config, weights, ops, attention, experts)

    return Decoder(config, source, layer)
