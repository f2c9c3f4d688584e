"""Decoder of a checkpoint: the blocks and norms that its architecture asks for.

An architecture is one entry in `engine/model_config/registry.py`; this module turns it into layers.
"""

from functools import partial

from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import Quant

from ..model_config.architecture import BlockKind, QKNorm
from ..model_config.config import ModelConfig
from ..model_config.recurrent.config import RecurrentKind
from ..weights.adapters import AdapterLayers
from ..weights.source import Weights, WeightSource
from .attention import Attention, FullWidthQKNormAttention, HeadLayerNormAttention, NarrowValueAttention
from .blocks import (
    MLP,
    DecoderBlock,
    EmptyBlock,
    LayerNormBlock,
    Mixer,
    ParallelBlock,
    ParallelNormsBlock,
    ParallelRMSNormBlock,
    PostNormBlock,
    PreNormBlock,
    SandwichNormBlock,
    SharedBlock,
    SharedParts,
    SingleNormBlock,
)
from .decoder import Decoder
from .encoder import BidirectionalAttention, Encoder
from .gemma import AltUpBlock, Gemma4Block, NormedValueAttention
from .latent import LatentAttention
from .mlp import GatedMLP, NormedMoE, SparseMoE
from .recurrent import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba1,
    Mamba2,
    ParallelMixers,
    RecurrentLayer,
    ShortConv,
)

_Block = type[PreNormBlock] | type[PostNormBlock] | type[SandwichNormBlock] | type[ParallelBlock]
BLOCKS: dict[BlockKind, _Block] = {
    "pre_norm": PreNormBlock,
    "post_norm": PostNormBlock,
    "sandwich": SandwichNormBlock,
    "parallel": ParallelBlock,
    "layer_norm": LayerNormBlock,
    "parallel_biased": ParallelBlock,
    "parallel_norms": ParallelNormsBlock,
    "parallel_rms": ParallelRMSNormBlock,
}
QK_NORMS: dict[QKNorm | None, type[Attention]] = {
    "width": FullWidthQKNormAttention,
    "layer": HeadLayerNormAttention,
    "layer_by_head": HeadLayerNormAttention,
}
"""Attention with another QK-norm than `Attention` has."""
RECURRENT: dict[RecurrentKind, tuple[type[RecurrentLayer], str]] = {
    "gated_delta": (GatedDeltaNet, "linear_attn"),
    "kimi_delta": (KimiDeltaAttention, "self_attn"),
    "mamba1": (Mamba1, "mamba"),
    "mamba2": (Mamba2, "mamba"),
    "short_conv": (ShortConv, "conv"),
}
"""Recurrent layers, and their names in a layer of the checkpoint."""


def build_model(config: ModelConfig, source: WeightSource, quant: Quant | None = None) -> Decoder | Encoder:
    """Build a rank's model, reading every tensor that it needs from `source`. Raises ModelError."""
    mixed_layers = config.num_layers if quant is not None and quant.is_mixed else 0
    if config.encoder is not None:
        return Encoder(config, config.encoder, source, mixed_layers)
    ops = source.ops
    adapters = None if ops.lora is None else AdapterLayers(ops)
    if adapters is not None:
        ops = adapters.ops
    make_layer = partial(build_layer, config, ops=ops, shared={})
    return Decoder(config, source, make_layer, mixed_layers, adapters)


def build_layer(
    config: ModelConfig,
    number: int,
    weights: Weights,
    ops: Ops,
    shared: dict[int, SharedParts] | None = None,
) -> DecoderBlock:
    """Build a layer from its weights. `shared`: blocks of the layers before that others share, by number."""
    _split_stacked_projections(config, weights)
    if config.shared is not None and number in config.shared.layers:
        assert shared is not None
        return _make_shared_block(config, number, weights, ops, shared)
    sizes = config.sizes_of(number)
    mixer = _make_mixer(config, number, weights, ops) if sizes.has_attention else None
    if config.block == "scaled_sandwich":
        assert isinstance(mixer, Attention)
        return Gemma4Block(config, number, weights, ops, mixer)
    if config.block == "altup":
        assert isinstance(mixer, Attention)
        return AltUpBlock(config, number, weights, ops, mixer)
    if not (sizes.has_attention or sizes.has_mlp):
        return EmptyBlock(weights, ops)
    if config.block in {"single", "shared"} or not (sizes.has_attention and sizes.has_mlp):
        mlp = None if mixer else _make_mlp(config, number, weights, ops)
        norm = "input_layernorm" if sizes.has_attention else "post_attention_layernorm"
        return SingleNormBlock(config, weights, ops, mixer, mlp, norm)
    assert mixer is not None
    is_recurrent = config.recurrent is not None and config.recurrent.layers[number]
    block = BLOCKS[config.recurrent_block if is_recurrent else config.block]
    return block(config, weights, ops, mixer, _make_mlp(config, number, weights, ops))


def _make_shared_block(
    config: ModelConfig, number: int, weights: Weights, ops: Ops, shared: dict[int, SharedParts]
) -> DecoderBlock:
    assert config.shared is not None
    assert config.recurrent is not None
    block = config.shared.layers.index(number) % config.shared.blocks
    if block not in shared:
        shared[block] = SharedParts.read(config, weights.at("shared_transformer"), ops, number)
    kind, name = RECURRENT[config.recurrent.kind]
    mamba = kind(config, number, weights.at(name), ops)
    return SharedBlock(config, weights, ops, mamba, shared[block], number)


def _make_mixer(config: ModelConfig, number: int, weights: Weights, ops: Ops) -> Mixer | None:
    """Build attention, a recurrent layer, or both side by side; None for a layer that has neither."""
    if config.recurrent is None:
        return _make_attention(config, number, weights, ops)
    recurrent, attention = None, None
    if config.recurrent.layers[number]:
        kind, name = RECURRENT[config.recurrent.kind]
        recurrent = kind(config, number, weights.at(name), ops)
    if config.recurrent.attention[number]:
        attention = _make_attention(config, number, weights, ops)
    if recurrent is None or attention is None:
        return recurrent or attention
    return ParallelMixers(config, recurrent, attention, ops, weights.device)


def _make_attention(config: ModelConfig, number: int, weights: Weights, ops: Ops) -> Mixer:
    if config.latent is not None:
        return LatentAttention(config, number, weights.at("self_attn"), ops)
    if config.is_bidirectional:
        return BidirectionalAttention(config, number, weights.at("self_attn"), ops)
    if config.norms_values:
        return NormedValueAttention(config, number, weights.at("self_attn"), ops)
    sizes = config.sizes_of(number)
    if sizes.value_dim != sizes.head_dim or config.scales.values != 1.0:
        return NarrowValueAttention(config, number, weights.at("self_attn"), ops)
    attention_kind = QK_NORMS.get(config.qk_norm, Attention)
    return attention_kind(config, number, weights.at("self_attn"), ops)


def _make_mlp(config: ModelConfig, number: int, weights: Weights, ops: Ops) -> MLP:
    experts, sizes = config.experts, config.sizes_of(number)
    if experts is None or not experts.layers[number]:
        if config.norms_experts:
            weights.skip("post_mlp_layernorm.")  # some checkpoints have it, unused
        return GatedMLP(config, weights.at("mlp"), ops, sizes.inner, sizes.limit)
    module = weights.at(experts.module) if experts.module else weights
    moe = SparseMoE(config, experts, module, ops, (sizes.experts_limit, sizes.limit))
    if not config.norms_experts:
        return moe
    return NormedMoE(
        moe, weights.vector("post_mlp_layernorm.weight", config.hidden_size), config.rms_norm_eps
    )


def _split_stacked_projections(config: ModelConfig, weights: Weights) -> None:
    if config.has_stacked_projections and not config.stacks_by_group:
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        weights.at("self_attn").split("qkv_proj", {"q_proj": q, "k_proj": kv, "v_proj": kv})
    if config.has_stacked_mlp:
        inner = config.intermediate_size
        weights.at("mlp").split("gate_up_proj", {"gate_proj": inner, "up_proj": inner})
