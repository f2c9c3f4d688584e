"""Qwen3-MoE: Qwen3 with experts in the place of MLPs, in the layers that config.json names."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..layers.experts import ExpertNames, Experts
from ..layers.layer import MLP, Layer, PreNormLayer
from ..layers.mlp import GatedMLP
from ..model_config import ModelConfig
from ..weights import Source, Weights


def qwen3_moe(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormLayer(config, weights, ops, attention, mlp(number, weights.at("mlp")))

    def mlp(number: int, weights: Weights) -> MLP:
        if config.experts is None or not config.experts.layers[number]:
            return GatedMLP(config, weights, ops)
        return Experts(config.experts, config.hidden_size, weights, ops, ExpertNames())

    return Decoder(config, source, layer)
