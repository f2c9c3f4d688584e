"""Decoder of a checkpoint: the blocks and norms that its architecture asks for.

An architecture is one entry in `engine/model_config/architectures.py`; this module turns it into layers.
"""

from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import Quant

from ..model_config.architecture import BlockKind
from ..model_config.config import ModelConfig
from ..weights.source import Weights, WeightSource
from .attention import Attention, FullWidthQKNormAttention
from .blocks import MLP, DecoderBlock, Mixer, ParallelBlock, PostNormBlock, PreNormBlock, SandwichNormBlock
from .decoder import Decoder
from .encoder import BidirectionalAttention, Encoder
from .latent_attention import LatentAttention
from .mlp import GatedMLP, SparseMoE
from .recurrent import GatedDeltaNet, Mamba2, ShortConv

_Block = type[PreNormBlock] | type[PostNormBlock] | type[SandwichNormBlock] | type[ParallelBlock]
BLOCKS: dict[BlockKind, _Block] = {
    "pre_norm": PreNormBlock,
    "post_norm": PostNormBlock,
    "sandwich": SandwichNormBlock,
    "parallel": ParallelBlock,
}


def build_model(config: ModelConfig, source: WeightSource, quant: Quant | None = None) -> Decoder | Encoder:
    """Build a rank's model, reading every tensor that it needs from `source`. Raises ModelError."""
    mixed_layers = config.num_layers if quant is not None and quant.is_mixed else 0
    if config.encoder is not None:
        return Encoder(config, config.encoder, source, mixed_layers)
    ops = source.ops
    block = BLOCKS[config.block]

    def make_layer(number: int, weights: Weights) -> DecoderBlock:
        _split_stacked_projections(config, weights)
        mixer = _make_mixer(config, number, weights, ops)
        return block(config, weights, ops, mixer, _make_mlp(config, number, weights, ops))

    return Decoder(config, source, make_layer, mixed_layers)


def _make_mixer(config: ModelConfig, number: int, weights: Weights, ops: Ops) -> Mixer:
    if config.recurrent is not None and config.recurrent.layers[number]:
        if config.recurrent.kind == "gated_delta":
            return GatedDeltaNet(config, number, weights.at("linear_attn"), ops)
        if config.recurrent.kind == "mamba2":
            return Mamba2(config, number, weights.at("mamba"), ops)
        return ShortConv(config, number, weights.at("conv"), ops)
    if config.latent is not None:
        return LatentAttention(config, number, weights.at("self_attn"), ops)
    if config.is_bidirectional:
        return BidirectionalAttention(config, number, weights.at("self_attn"), ops)
    attention_kind = FullWidthQKNormAttention if config.qk_norm == "width" else Attention
    return attention_kind(config, number, weights.at("self_attn"), ops)


def _make_mlp(config: ModelConfig, number: int, weights: Weights, ops: Ops) -> MLP:
    experts = config.experts
    if experts is None or not experts.layers[number]:
        return GatedMLP(config, weights.at("mlp"), ops)
    return SparseMoE(config, experts, weights.at(experts.module) if experts.module else weights, ops)


def _split_stacked_projections(config: ModelConfig, weights: Weights) -> None:
    if config.has_stacked_projections:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        weights.at("self_attn").split("qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv})
    if config.has_stacked_mlp:
        inner = config.intermediate_size
        weights.at("mlp").split("gate_up_proj", {"gate_proj": inner, "up_proj": inner})
