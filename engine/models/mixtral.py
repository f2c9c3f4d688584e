"""Mixtral: Mistral with experts in the place of every MLP."""

from ..layers.attention import Attention
from ..layers.decoder import MLP, Decoder
from ..layers.experts import ExpertNames, Experts
from ..model_config import ModelConfig
from ..weights import Source, Weights

NAMES = ExpertNames("w1", "w3", "w2")


def mixtral(config: ModelConfig, source: Source) -> Decoder:
    def attention(layer: int, weights: Weights) -> Attention:
        return Attention(config, layer, weights, source.ops)

    def mlp(_layer: int, weights: Weights) -> MLP:
        assert config.experts is not None
        return Experts(config.experts, config.hidden_size, weights.at("block_sparse_moe"), source.ops, NAMES)

    return Decoder(config, source, attention, mlp)
