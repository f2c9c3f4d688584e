"""Numbers of parameters of a model, for estimates of its memory and speed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from llmbox.kernels.activation import UNGATED, XIELU

from .architecture import BIASED_NORMS, WIDE_NORMS, BlockKind

if TYPE_CHECKING:
    from .config import ModelConfig

_NORMS: Final[Mapping[BlockKind, int]] = {
    "sandwich": 4,
    "scaled_sandwich": 4,
    "altup": 4,
    "parallel": 1,
    "parallel_biased": 1,
    "parallel_rms": 1,
    "single": 1,
}
"""Norms of a layer, where there are not two."""


def count_parameters(config: "ModelConfig") -> int:
    """Return the number of parameters to load; tied weights count once."""
    if config.encoder is not None:
        return config.encoder.parameters(config)
    if config.layer_sizes:
        return _count_by_layer(config)
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norms = 2 * config.head_dim if config.qk_norm == "heads" else (q + kv) * (config.qk_norm in WIDE_NORMS)
    norm = hidden * (1 + (config.block in BIASED_NORMS)) * config.has_norm_weights
    layer = _NORMS.get(config.block, 2) * norm + config.extra_params[0]
    attention = norms + hidden * (q + 2 * kv) + q * hidden
    attention += q * (hidden + config.qkv_bias) * bool(config.attention_gate)
    attention += (q + 2 * kv) * config.qkv_bias + hidden * config.o_bias
    attention += q * config.has_sub_norms
    attention += config.num_heads * (config.has_sinks + hidden * config.has_head_gate)
    if config.latent is not None:
        attention = config.latent.shape(hidden, config.num_heads).params
        attention += config.num_heads * hidden * config.has_head_gate
    mixers = config.layers_with(range(config.num_layers), state=False) * attention
    if config.recurrent is not None:
        mixers += sum(config.recurrent.layers) * config.recurrent.parameters(hidden)
    matrices = 2 if config.activation in UNGATED else 3
    mlp = matrices * hidden * ffn + ((matrices - 1) * ffn + hidden) * config.mlp_bias
    mlp += ffn * config.has_sub_norms
    mlp += len(XIELU._fields) * (config.activation == "xielu")
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    tables += config.position_rows * hidden + config.vocab_size * config.head_bias
    experts = 0
    if (moe := config.experts) is not None:
        experts = moe.num_layers * (moe.parameters(hidden) + hidden * config.norms_experts)
    layers = config.num_layers * layer + mixers + config.mlp_layers * mlp
    return tables + layers + experts + norm + config.extra_params[1]


def _count_by_layer(config: "ModelConfig") -> int:
    """Return the number of parameters where the layers differ in size."""
    hidden = config.hidden_size
    norms = _NORMS.get(config.block, 2) * hidden
    tables = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    tables += config.per_layer_vocab * config.per_layer_row
    return tables + config.num_layers * norms + count_linear_params(config) + hidden + config.extra_params[1]


def count_linear_params(config: "ModelConfig") -> int:
    """Return the number of parameters of all layers without the norms around attention and MLP."""
    hidden = config.hidden_size
    mixers = sum(
        _attention_params(config, layer)
        for layer in range(config.num_layers)
        if config.recurrent is None or not config.recurrent.layers[layer]
    )
    if config.recurrent is not None:
        mixers += sum(config.recurrent.layers) * config.recurrent.parameters(hidden)
    is_sparse = (False,) * config.num_layers if config.experts is None else config.experts.layers
    inner = sum(config.sizes_of(layer).inner for layer, sparse in enumerate(is_sparse) if not sparse)
    mlps = 3 * hidden * inner + (2 * inner + is_sparse.count(False) * hidden) * config.mlp_bias
    experts = 0 if config.experts is None else sum(is_sparse) * config.experts.parameters(hidden)
    return mixers + mlps + experts + config.num_layers * config.extra_params[0]


def _attention_params(config: "ModelConfig", layer: int) -> int:
    sizes, hidden = config.sizes_of(layer), config.hidden_size
    if config.latent is not None:
        return config.latent.shape(hidden, config.num_heads).params
    is_owner, heads = sizes.kv_source == layer, sizes.heads
    q, results = heads * sizes.head_dim, heads * sizes.value_dim
    k, v = sizes.kv_heads * sizes.head_dim * is_owner, sizes.kv_heads * sizes.value_dim * is_owner
    norms = {"heads": (1 + is_owner) * sizes.head_dim, "width": q + k}.get(config.qk_norm or "", 0)
    linears = hidden * (q + results + k + v * sizes.has_values + heads * config.has_head_gate)
    gates = q * (hidden + config.qkv_bias) * bool(config.attention_gate)
    biases = (q + k + v) * config.qkv_bias + hidden * config.o_bias
    biases += heads * (config.has_sinks and sizes.has_sinks)
    return norms + linears + gates + biases


def list_inputs(config: "ModelConfig") -> tuple[tuple[str, int], ...]:
    """Return `ModelShape.other_inputs`."""
    layers = [config.sizes_of(layer) for layer in range(len(config.layer_sizes))]
    widths = {("a narrower attention", sizes.heads * sizes.value_dim) for sizes in layers}
    return tuple(sorted(widths | {("a smaller MLP", sizes.inner) for sizes in layers}))
