"""Phi-3, Phi-3.5 and Phi-4 (mini too): Llama whose checkpoints stack q, k and v, and gate and up."""

from ..model.attention import Attention
from ..model.blocks import DecoderBlock, PreNormBlock
from ..model.decoder import Decoder
from ..model.mlp import GatedMLP
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource


def phi3(config: ModelConfig, source: WeightSource) -> Decoder:
    ops, ffn = source.ops, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def layer(number: int, weights: Weights) -> DecoderBlock:
        weights.at("self_attn").split("qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv})
        weights.at("mlp").split("gate_up_proj", {"gate_proj": ffn, "up_proj": ffn})
        attention = Attention(config, number, weights.at("self_attn"), ops)
        return PreNormBlock(config, weights, ops, attention, GatedMLP(config, weights.at("mlp"), ops))

    return Decoder(config, source, layer)
