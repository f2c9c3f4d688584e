"""SmolLM3: Llama; queries and keys of some layers are not rotated (`ModelConfig.layer_ropes`)."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..layers.layer import Layer, PreNormLayer
from ..layers.mlp import GatedMLP
from ..model_config import ModelConfig
from ..weights import Source, Weights


def smollm3(config: ModelConfig, source: Source) -> Decoder:
    ops = source.ops

    def layer(number: int, weights: Weights) -> Layer:
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormLayer(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
