"""Phi-3, Phi-3.5 and Phi-4 (mini too): Llama whose checkpoints stack q, k and v, and gate and up."""

from ..layers.attention import Attention
from ..layers.decoder import Decoder
from ..layers.layer import Layer, PreNormLayer
from ..layers.mlp import GatedMLP
from ..model_config import ModelConfig
from ..weights import Source, Weights


def phi3(config: ModelConfig, source: Source) -> Decoder:
    ops, ffn = source.ops, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(number: int, weights: Weights) -> Layer:
        weights.at("self_attn").split("qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv})
        weights.at("mlp").split("gate_up_proj", {"gate_proj": ffn, "up_proj": ffn})
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormLayer(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
