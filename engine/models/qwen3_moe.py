"""Qwen3-MoE: Qwen3 with experts in the place of MLPs, in the layers that config.json names."""

from ..layers.attention import Attention
from ..layers.decoder import MLP, Decoder
from ..layers.experts import ExpertNames, Experts
from ..layers.mlp import GatedMLP
from ..model_config import ModelConfig
from ..weights import Source, Weights


def qwen3_moe(config: ModelConfig, source: Source) -> Decoder:
    def attention(layer: int, weights: Weights) -> Attention:
        return Attention(config, layer, weights, source.ops, qk_norm=True)

    def mlp(layer: int, weights: Weights) -> MLP:
        if config.experts is None or not config.experts.layers[layer]:
            return GatedMLP(config, weights.at("mlp"), source.ops)
        return Experts(config.experts, config.hidden_size, weights.at("mlp"), source.ops, ExpertNames())

    return Decoder(config, source, attention, mlp)
