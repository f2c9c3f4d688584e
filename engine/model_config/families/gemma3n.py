"""Rules for Gemma 3n, used by `architectures.py`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..architecture import AltUpConfig, Architecture
from ..fields import Fields
from ..shape import LayerSizes
from ..sliding_window import FULL, SLIDING, layer_types, windows_by_type
from .gemma import ACTIVATION, gemma3_ropes, refuse_gemma3
from .gemma4 import gemma4_scales, shared_sources

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
    layers, found = fields.integer("num_hidden_layers"), {}
    if fields.raw.get("layer_types") is None:
        found["layer_types"] = [FULL if layer % 5 == 4 else SLIDING for layer in range(layers)]
    inner = fields.raw["intermediate_size"]
    each = inner if isinstance(inner, list) else [inner] * layers
    rows = [Fields({"intermediate_size": one}, fields.where).integer("intermediate_size") for one in each]
    if len(rows) != layers:
        raise fields.error(f"intermediate_size must be a number, or one for each of {layers} layers")
    return {**found, "intermediate_size": max(rows), "layer_inner": rows}


def gemma3n_layers(fields: Fields, layers: int) -> tuple[LayerSizes, ...]:
    inner, sparsity = fields.raw["layer_inner"], _sparsity(fields, layers)
    heads, head_dim = fields.integer("num_key_value_heads"), fields.integer("head_dim")
    return tuple(
        LayerSizes(
            kv_heads=heads, head_dim=head_dim, inner=inner[layer], kv_source=source, sparsity=sparsity[layer]
        )
        for layer, source in enumerate(shared_sources(fields, layer_types(fields, layers)))
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


def gemma3n_extra_params(fields: Fields) -> tuple[int, int]:
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    width, altup = fields.integer("hidden_size_per_layer_input"), gemma3n_altup(fields)
    streams = altup.streams
    own = 2 * hidden * width + hidden
    laurel = 2 * hidden * altup.laurel_rank + hidden
    coefficients = hidden * (streams + 2) + streams**2 + streams**3
    whole = hidden * layers * width + width + 2 * (streams - 1) * hidden * hidden
    return own + laurel + coefficients, whole


_GEMMA3N = Architecture(
    model_type="gemma3n_text",
    defaults=GEMMA3N,
    hidden_acts=(ACTIVATION,),
    activation="gelu_tanh",
    fits_float16=False,
    qk_norm="heads",
    norms_values=True,
    block="altup",
    sizes=gemma3n_sizes,
    windows=windows_by_type,
    ropes=gemma3_ropes,
    scales=gemma4_scales,
    layer_sizes=gemma3n_layers,
    per_layer=gemma3n_per_layer,
    altup=gemma3n_altup,
    extra_params=gemma3n_extra_params,
    refuse=refuse_gemma3,
)

GEMMA3N_MODELS: dict[str, Architecture] = {
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA3N, is_nested=True),
}
