"""Tensors that a decoder asks of an unquantized checkpoint, by name and shape, which `fit` checks too.

They come in the order in which `engine/model` asks for them, so that both name the same one of several.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from llmbox.kernels.activation import UNGATED

from ..checkpoint.index import NOT_NEEDED
from ..checkpoint.safetensors import TensorEntry, misplaced_tensor, missing_tensor, wrong_shape
from .config import ModelConfig

Expected = Iterator[tuple[str, tuple[int, ...]]]
_NORMS: Final = {
    "pre_norm": ("input_layernorm", "post_attention_layernorm"),
    "post_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "sandwich": (
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        "input_layernorm",
        "pre_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm",),
}


def check_decoder(where: str, config: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
    """Raise ModelError for the first tensor that is missing, has another shape than config.json says, or has
    no place in its architecture. Models whose layers are not all attention and an MLP are left to the load.
    """
    if not is_plain(config):
        return
    left = dict(entries)
    for name, shape in expected_tensors(config, left):
        entry = left.pop(name, None)
        if entry is None:
            raise missing_tensor(where, name)
        if entry.shape != shape:
            raise wrong_shape(entry, shape)
    layers = range(config.num_layers, config.num_layers + config.extra_layers)
    unused = ("mtp.", *(f"model.layers.{layer}." for layer in layers))
    if config.tie_word_embeddings:
        unused = (*unused, "lm_head.weight")
    left = {
        name: entry
        for name, entry in left.items()
        if not name.startswith(unused) and not name.endswith(NOT_NEEDED)
    }
    if left and config.experts is None:
        raise misplaced_tensor(left)


def is_plain(config: ModelConfig) -> bool:
    """Return whether all layers have attention and an MLP or experts, of one size."""
    special = (config.encoder, config.recurrent, config.latent, config.altup, config.stored)
    if any(each is not None for each in special) or config.layer_sizes or config.per_layer_width:
        return False
    if config.has_sinks or config.is_bidirectional or config.norms_values or config.head_bias:
        return False
    return config.activation != "xielu" and config.block in _NORMS


def expected_tensors(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> Expected:
    """Yield names and shapes. `entries` tells which linears are stacked; these are not checked."""
    hidden = config.hidden_size
    yield _named(config, "", "model.embed_tokens.weight"), (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        yield from _attention(config, f"model.layers.{layer}.", entries)
        yield from _mlp(config, layer, entries)
        for norm in _NORMS[config.block]:
            yield _named(config, f"model.layers.{layer}.", f"{norm}.weight"), (hidden,)
    yield _named(config, "", "model.norm.weight"), (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _attention(config: ModelConfig, prefix: str, entries: Mapping[str, TensorEntry]) -> Expected:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    rows = {"q_proj": q * (1 + config.has_attention_gate), "k_proj": kv, "v_proj": kv}
    module = _named(config, prefix, "self_attn.")
    norms = {"heads": (head_dim, head_dim), "width": (q, kv)}.get(config.qk_norm or "")
    named_norms = list(zip(("q_norm", "k_norm"), norms, strict=True)) if norms else []
    if config.has_stacked_projections and f"{module}qkv_proj.weight" in entries:
        yield from _entry_as_it_is(f"{module}qkv_proj", entries)
    else:
        yield from _linear(config, module, rows, hidden, has_bias=config.qkv_bias)
    output = list(_linear(config, module, {"o_proj": hidden}, q, has_bias=config.o_bias))
    queries_first = config.qk_norm == "heads"
    if not queries_first:
        yield from output
    for norm, width in named_norms:
        yield _named(config, module, f"{norm}.weight"), (width,)
    if queries_first:
        yield from output


def _mlp(config: ModelConfig, layer: int, entries: Mapping[str, TensorEntry]) -> Expected:
    prefix, hidden, inner = f"model.layers.{layer}.", config.hidden_size, config.intermediate_size
    if config.experts is not None and config.experts.layers[layer]:
        module = _named(config, prefix, f"{config.experts.module}.") if config.experts.module else prefix
        yield _named(config, module, f"{config.experts.router}.weight"), (config.experts.count, hidden)
        return
    module = _named(config, prefix, "mlp.")
    ups = ("up_proj",) if config.activation in UNGATED else ("gate_proj", "up_proj")
    stack = _named(config, module, "gate_up_proj")
    if config.has_stacked_mlp and f"{stack}.weight" in entries:
        yield from _entry_as_it_is(stack, entries)
    else:
        yield from _linear(config, module, dict.fromkeys(ups, inner), hidden, has_bias=config.mlp_bias)
    yield from _linear(config, module, {"down_proj": hidden}, inner, has_bias=config.mlp_bias)


def _linear(
    config: ModelConfig, module: str, rows: Mapping[str, int], inputs: int, *, has_bias: bool
) -> Expected:
    for name, outputs in rows.items():
        yield _named(config, module, f"{name}.weight"), (outputs, inputs)
    for name, outputs in rows.items() if has_bias else ():
        yield _named(config, module, f"{name}.bias"), (outputs,)


def _entry_as_it_is(name: str, entries: Mapping[str, TensorEntry]) -> Expected:
    for each in (f"{name}.weight", f"{name}.bias"):
        if each in entries:
            yield each, entries[each].shape


def _named(config: ModelConfig, prefix: str, name: str) -> str:
    """Return a name as the checkpoint has it (`Weights`)."""
    names = config.names
    if name in names:
        return prefix + names[name]
    return prefix + ".".join(names.get(part, part) for part in name.split("."))
