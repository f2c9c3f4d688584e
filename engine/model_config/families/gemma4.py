"""Gemma 4 and Gemma 3n: defaults, rules and entries of `registry.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import attention
from ..architecture import AltUpConfig, Architecture
from ..attention import FULL, SLIDING, LayerSizes, Scales, Windows
from ..fields import Fields
from ..moe import StackedExperts, integer, read_experts, selected_by
from ..rope import LayerRopes, read_proportional_rope
from .gemma import ACTIVATION, gemma3_ropes, gemma_scales, logits_cap, refuse_gemma2, refuse_gemma3

GEMMA4: Mapping[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": ACTIVATION,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "enable_moe_block": False,
}
"""Defaults of transformers for its text part."""
GEMMA4_UNIFIED: Mapping[str, Any] = {
    **GEMMA4,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
"""For Gemma 4 without towers, of which the layers read pixels and sounds."""
_ROPES: Mapping[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_WIDTHS = ("head_dim", "num_key_value_heads")


def refuse_gemma4(fields: Fields) -> None:
    refuse_gemma2(fields)
    _types(fields)
    if fields.raw.get("attn_logit_softcapping") is not None:
        raise fields.error("attn_logit_softcapping is not supported in a Gemma 4: no published one has it")


def gemma4_sizes(fields: Fields) -> dict[str, Any]:
    """Return heads of full attention as those of the model, and others under `sliding_…`.

    Before transformers 5.20 wrote them by layer, they were `global_head_dim` and
    `num_global_key_value_heads`.
    """
    types, by_layer = _types(fields), fields.mapping("per_layer_config")
    heads = {key: fields.integer(key) for key in _WIDTHS}
    found = {f"sliding_{key}": value for key, value in heads.items()}
    if by_layer is None:
        found["head_dim"] = fields.integer("global_head_dim")
        if fields.flag("attention_k_eq_v", default=False):
            few = fields.integer("num_global_key_value_heads", heads["num_key_value_heads"])
            found["num_key_value_heads"] = few
        return found
    full = {str(layer) for layer, name in enumerate(types) if name == FULL}
    first = next(iter(by_layer.values()), None)
    written = sorted(layer.lstrip("0") or "0" for layer in by_layer)  # `05` in a model of ten layers and more
    if written != sorted(full) or not isinstance(first, dict) or not first.keys() <= set(_WIDTHS):
        raise fields.error(f"per_layer_config must give {' and '.join(_WIDTHS)} of the layers of {FULL}")
    if any(each != first for each in by_layer.values()):
        raise fields.error(f"per_layer_config must give all layers of {FULL} the same sizes")
    own = Fields(first, f"{fields.where}: per_layer_config")
    return found | {key: own.integer(key, heads[key]) for key in _WIDTHS}


def shared_sources(fields: Fields, types: Sequence[str]) -> tuple[int, ...]:
    """Return the layer whose KV each layer reads: the last `num_kv_shared_layers` layers read that of the
    last layer of their type before them. Raises ModelError.
    """
    layers, key = len(types), "num_kv_shared_layers"
    shared = fields.number(key, 0)
    if not 0 <= shared < layers or shared != int(shared):
        raise fields.error(f"{key} {fields.raw.get(key)!r} must be a whole number below {layers} layers")
    first = layers - int(shared)
    last = {name: layer for layer, name in enumerate(types[:first])}
    if shared and (missing := set(types[first:]) - last.keys()):
        raise fields.error(
            f"{key} {int(shared)} leaves no layer of {min(missing)} before those that share its keys "
            "and values"
        )
    return tuple(layer if layer < first else last[name] for layer, name in enumerate(types))


def gemma4_layers(fields: Fields, layers: int) -> tuple[LayerSizes, ...]:
    types = _types(fields)
    full, sliding = (
        (fields.integer(f"{kind}num_key_value_heads"), fields.integer(f"{kind}head_dim"))
        for kind in ("", "sliding_")
    )
    heads = fields.integer("num_attention_heads")
    if sliding[1] % 2 or sliding[1] > full[1]:
        raise fields.error(f"head_dim {sliding[1]} must be even, and at most the {full[1]} of full attention")
    if heads % sliding[0]:
        raise fields.error(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {sliding[0]}"
        )
    inner, wide = fields.integer("intermediate_size"), fields.flag("use_double_wide_mlp", default=False)
    equal = fields.flag("attention_k_eq_v", default=False)
    found = []
    for layer, source in enumerate(shared_sources(fields, types)):
        kv_heads, head_dim = full if types[layer] == FULL else sliding
        found.append(
            LayerSizes(
                kv_heads=kv_heads,
                head_dim=head_dim,
                inner=inner * (2 if wide and source != layer else 1),
                kv_source=source,
                has_values=not (equal and types[layer] == FULL),
            )
        )
    if len(found) != layers:
        raise fields.error(f"layer_types must name {FULL} or {SLIDING} for each of {layers} layers")
    return tuple(found)


def gemma4_windows(fields: Fields, _layers: int) -> Windows:
    window = attention.window_of(fields)
    if window is None:
        raise fields.error("sliding_window is missing")
    return tuple(window if name == SLIDING else None for name in _types(fields))


def gemma4_ropes(fields: Fields, head_dim: int, positions: int, _layers: int) -> LayerRopes:
    """Return two RoPE variants: the first for layers of full attention, the second for sliding windows."""
    by_type = fields.mapping("rope_parameters") or _ROPES
    if not set(by_type) <= {SLIDING, FULL}:
        raise fields.error(f"rope_parameters must be those of {FULL} and {SLIDING}")
    raw = Fields(by_type, f"{fields.where}: rope_parameters")
    widths = {FULL: head_dim, SLIDING: fields.integer("sliding_head_dim")}
    found = tuple(
        read_proportional_rope(raw.mapping(name) or dict(_ROPES[name]), raw, widths[name], positions)
        for name in widths
    )
    return found, tuple(int(name == SLIDING) for name in _types(fields))


def gemma4_scales(fields: Fields) -> Scales:
    return replace(gemma_scales(fields), attention=1.0, logits_cap=logits_cap(fields))


def gemma4_per_layer(fields: Fields) -> tuple[int, int]:
    width = _per_layer_width(fields)
    return width, fields.integer("vocab_size_per_layer_input") if width else 0


def _per_layer_width(fields: Fields) -> int:
    if fields.raw.get("hidden_size_per_layer_input") == 0:
        return 0
    return fields.integer("hidden_size_per_layer_input", 0)


def _types(fields: Fields) -> list[str]:
    """Return the attention type of each layer, by default every sixth full. The last is full whatever its
    file says, as in transformers.
    """
    types = attention.layer_types(
        fields.replace(**attention.types_every(6)(fields)), fields.integer("num_hidden_layers")
    )
    return [*types[:-1], FULL]


_GEMMA4 = Architecture(
    model_type="gemma4_text",
    defaults=GEMMA4,
    hidden_acts={ACTIVATION: "gelu_tanh"},
    fits_float16=False,
    qk_norm="heads",
    norms_values=True,
    block="scaled_sandwich",
    sizes=gemma4_sizes,
    windows=gemma4_windows,
    ropes=gemma4_ropes,
    scales=gemma4_scales,
    experts=read_experts(
        selected_by("num_experts", top_k="top_k_experts"),
        without={"enable_moe_block": False},
        normalized=True,
        shared_inner=integer("intermediate_size"),
        module="",
        router="router.proj",
        shared="mlp",
        factors="router.per_expert_scale",
        stacked=StackedExperts(),
    ),
    layer_sizes=gemma4_layers,
    per_layer=gemma4_per_layer,
    refuse=refuse_gemma4,
)
_GEMMA4_UNIFIED = replace(_GEMMA4, model_type="gemma4_unified_text", defaults=GEMMA4_UNIFIED)

GEMMA4_MODELS: dict[str, Architecture] = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, is_nested=True),
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(_GEMMA4_UNIFIED, is_nested=True),
}


GEMMA3N: Mapping[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "altup_num_inputs": 4,
}
"""Defaults of transformers for its text part."""
MOST_STREAMS = 8
"""Streams that the C++ kernels have room for."""


def gemma3n_sizes(fields: Fields) -> dict[str, Any]:
    """Return the type of each layer, by default every fifth full, and the largest MLP."""
    layers = fields.integer("num_hidden_layers")
    inner = fields.raw["intermediate_size"]
    each = inner if isinstance(inner, list) else [inner] * layers
    rows = [Fields({"intermediate_size": one}, fields.where).integer("intermediate_size") for one in each]
    if len(rows) != layers:
        raise fields.error(f"intermediate_size must be a number, or one for each of {layers} layers")
    return {**attention.types_every(5)(fields), "intermediate_size": max(rows), "layer_inner": rows}


def gemma3n_layers(fields: Fields, layers: int) -> tuple[LayerSizes, ...]:
    inner, sparsity = fields.raw["layer_inner"], _sparsity(fields, layers)
    heads, head_dim = fields.integer("num_key_value_heads"), fields.integer("head_dim")
    return tuple(
        LayerSizes(
            kv_heads=heads, head_dim=head_dim, inner=inner[layer], kv_source=source, sparsity=sparsity[layer]
        )
        for layer, source in enumerate(shared_sources(fields, attention.layer_types(fields, layers)))
    )


def _sparsity(fields: Fields, layers: int) -> tuple[float, ...]:
    """Return the share of gates that are set to 0, by default 0.95 in the first ten of more layers."""
    if fields.raw.get("activation_sparsity_pattern") is None:
        return tuple(0.95 if layers > 10 > layer else 0.0 for layer in range(layers))
    pattern = fields.numbers("activation_sparsity_pattern")
    if len(pattern) != layers or not all(0.0 <= share < 1.0 for share in pattern):
        raise fields.error(f"activation_sparsity_pattern must have {layers} numbers from 0 to below 1")
    return pattern


def gemma3n_per_layer(fields: Fields) -> tuple[int, int]:
    return fields.integer("hidden_size_per_layer_input"), fields.integer("vocab_size_per_layer_input")


def gemma3n_altup(fields: Fields) -> AltUpConfig:
    streams, active = fields.integer("altup_num_inputs"), fields.number("altup_active_idx", 0)
    if not 2 <= streams <= MOST_STREAMS:
        raise fields.error(f"altup_num_inputs {streams} is not supported, only 2 to {MOST_STREAMS}")
    if active not in range(streams):
        raise fields.error(f"altup_active_idx {active:g} is none of the {streams} streams")
    return AltUpConfig(
        streams=streams,
        active=int(active),
        laurel_rank=fields.integer("laurel_rank"),
        scales_output=fields.flag("altup_correct_scale", default=True),
    )


_GEMMA3N = Architecture(
    model_type="gemma3n_text",
    defaults=GEMMA3N,
    hidden_acts={ACTIVATION: "gelu_tanh"},
    fits_float16=False,
    qk_norm="heads",
    norms_values=True,
    block="altup",
    sizes=gemma3n_sizes,
    windows=attention.windows_by_type,
    ropes=gemma3_ropes,
    scales=gemma4_scales,
    layer_sizes=gemma3n_layers,
    per_layer=gemma3n_per_layer,
    altup=gemma3n_altup,
    refuse=refuse_gemma3,
)

GEMMA3N_MODELS: dict[str, Architecture] = {
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA3N, is_nested=True),
}
