"""Mixtral: Mistral with experts in the place of every MLP."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..layers.experts import ExpertNames, Experts
from ..layers.layer import Layer, PreNormLayer
from ..model_config import ModelConfig
from ..weights import Source, Weights

NAMES = ExpertNames("w1", "w3", "w2")


def mixtral(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        assert config.experts is not None
        attention = Attention(config, number, weights.at("self_attn"), ops)
        experts = Experts(config.experts, config.hidden_size, weights.at("block_sparse_moe"), ops, NAMES)
        return PreNormLayer(config, weights, ops, attention, experts)

    return Decoder(config, source, layer)
