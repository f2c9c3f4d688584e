"""Gemma, Gemma 2 and Gemma 3, and Muse Glimmer: defaults, rules and entries of `registry.py`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..architecture import Architecture
from ..attention import FULL, SLIDING, Scales, layer_types, types_by_pattern, types_where, windows_by_type
from ..fields import Fields
from ..rope import LayerRopes, RopeConfig, except_in, one_rope, parse_rope

_COMMON: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
GEMMA: Mapping[str, Any] = {
    **_COMMON,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
GEMMA2: Mapping[str, Any] = {
    **_COMMON,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3: Mapping[str, Any] = {
    **_COMMON,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
"""Defaults of transformers: published files omit them, and those of vision-language models omit nearly
all."""
ACTIVATION = "gelu_pytorch_tanh"


def refuse_gemma(fields: Fields) -> None:
    if fields.flag("attention_bias", default=False):
        raise fields.error("attention_bias is not supported in a Gemma")


def refuse_gemma2(fields: Fields) -> None:
    refuse_gemma(fields)
    name = fields.text("hidden_activation", ACTIVATION)
    if name != ACTIVATION:
        raise fields.error(f"hidden_activation {name!r} is not supported, only {ACTIVATION!r}")


def refuse_gemma3(fields: Fields) -> None:
    refuse_gemma2(fields)
    if fields.raw.get("attn_logit_softcapping") is not None:
        raise fields.error("attn_logit_softcapping is not supported in a Gemma 3: no published one has it")


def gemma_scales(fields: Fields) -> Scales:
    return Scales(embedding=fields.integer("hidden_size") ** 0.5, rounds_embedding=True)


def gemma2_scales(fields: Fields) -> Scales:
    return replace(
        gemma_scales(fields),
        attention=_positive(fields, "query_pre_attn_scalar") ** -0.5,
        attention_cap=_cap(fields, "attn_logit_softcapping"),
        logits_cap=logits_cap(fields),
    )


def logits_cap(fields: Fields) -> float | None:
    return _cap(fields, "final_logit_softcapping")


def gemma3_ropes(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return two RoPE variants: the first for layers of full attention, the second for sliding windows."""
    whole = _rope(fields, FULL, head_dim, positions)
    if whole.rope_type == "linear":  # max_position_embeddings is the length after scaling
        whole = replace(whole, original_context=int(positions / whole.factor))
    local = _rope(fields, SLIDING, head_dim, positions)
    types = layer_types(fields, layers)
    return (whole, local), tuple(int(name == SLIDING) for name in types)


def _rope(fields: Fields, layer_type: str, head_dim: int, positions: int) -> RopeConfig:
    """Read the RoPE of a layer type. Before transformers 5 `rope_scaling` was that of full attention."""
    is_local = layer_type == SLIDING
    theta = fields.number("rope_local_base_freq", 1e4) if is_local else fields.number("rope_theta", 1e6)
    scaling = None if is_local else fields.mapping("rope_scaling")
    by_type = fields.mapping("rope_parameters")
    if by_type is not None:
        if not by_type or not set(by_type) <= {SLIDING, FULL}:
            raise fields.error(f"rope_parameters must be those of {FULL} and {SLIDING}")
        scaling = Fields(by_type, f"{fields.where}: rope_parameters").mapping(layer_type)
    rope = parse_rope(
        Fields({"rope_parameters": scaling, "rope_theta": theta}, fields.where), head_dim, positions
    )
    if rope.rope_type in {"dynamic", "longrope"}:
        raise fields.error(f"RoPE type {rope.rope_type!r} is not supported in a Gemma 3")
    return rope


def _cap(fields: Fields, key: str) -> float | None:
    """Return a logit softcap; None if it is null or missing."""
    return None if fields.raw.get(key) is None else _positive(fields, key)


def _positive(fields: Fields, key: str) -> float:
    number = fields.number(key)
    if number <= 0:
        raise fields.error(f"{key} {number} must be larger than 0")
    return number


def muse_glimmer_still_layers(fields: Fields, layers: int) -> list[bool]:
    """Return True for layers with a 0 in `layer_rope_theta`, by default for every fourth."""
    thetas = fields.numbers("layer_rope_theta") or [float((layers - 1 - n) % 4) for n in range(layers)]
    if len(thetas) != layers:
        raise fields.error(f"layer_rope_theta must have {layers} numbers, not {len(thetas)}")
    return [theta == 0 for theta in thetas]


def muse_glimmer_scales(fields: Fields) -> Scales:
    """Return the factor of normed queries, and that of logits before their softcap."""
    return Scales(
        attention=_positive(fields, "qk_scale_factor") * fields.integer("head_dim", 128) ** -0.5,
        logits=_positive(fields, "output_multiplier"),
        logits_cap=logits_cap(fields),
    )


_GEMMA = Architecture(
    model_type="gemma",
    defaults=GEMMA,
    hidden_acts=dict.fromkeys((ACTIVATION, "gelu"), "gelu_tanh"),
    norms_add_one=True,
    fits_float16=False,
    scales=gemma_scales,
    refuse=refuse_gemma,
)
_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    defaults=GEMMA2,
    block="sandwich",
    sizes=types_where(lambda layer, _layers: layer % 2 == 1),
    windows=windows_by_type,
    scales=gemma2_scales,
    refuse=refuse_gemma2,
)
_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    defaults=GEMMA3,
    qk_norm="heads",
    sizes=types_by_pattern,
    ropes=gemma3_ropes,
    refuse=refuse_gemma3,
    may_be_bidirectional=True,
)
_VAULT_GEMMA = replace(
    _GEMMA2,
    model_type="vaultgemma",
    block="pre_norm",
    names={"post_attention_layernorm": "pre_feedforward_layernorm"},
)

GEMMA_MODELS: dict[str, Architecture] = {
    "MuseGlimmerForConditionalGeneration": Architecture(
        model_type="muse_glimmer_text",
        defaults={
            "rms_norm_eps": 1e-5,
            "post_norm_eps": 1e-8,
            "sliding_window": 2048,
            "qk_scale_factor": 3.87,
            "output_multiplier": 26**-0.5,
            "final_logit_softcapping": 20.0,
        },
        head_dim=128,
        norms_add_one=True,
        has_plain_last_norm=True,
        norms_embedding=True,
        fits_float16=False,
        attention_bias=True,
        attention_gate="gate_proj",
        qk_norm="no_weight_anywhere",
        block="sandwich",
        is_nested=True,
        sizes=types_where(lambda layer, layers: (layers - 1 - layer) % 4 == 0),
        windows=windows_by_type,
        ropes=except_in(one_rope, muse_glimmer_still_layers),
        scales=muse_glimmer_scales,
        aliases={"hidden_act": "hidden_activation"},
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "VaultGemmaForCausalLM": _VAULT_GEMMA,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, is_nested=True),
}
