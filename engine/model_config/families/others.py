"""Llama 4, Mistral 4, AFMoE, OLMo 2, MiniCPM 3 and Phi-MoE: defaults, rules and entries of
`architectures.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..architecture import Architecture
from ..attention import (
    Scales,
    Windows,
    deepseek_latent,
    deepseek_scales,
    deepseek_sizes,
    one_window,
    types_by_pattern,
    windows_by_type,
)
from ..fields import Fields, raw_rope
from ..moe import (
    ExpertsConfig,
    StackedExperts,
    deepseek_experts,
    deepseek_v3_experts,
    experts_with,
    olmoe_experts,
    refuse_small_groups,
    selected_of,
)
from ..rope import (
    MAX_FACTOR,
    LayerRopes,
    RopeConfig,
    deepseek_rope,
    interleaved_rope,
    olmo3_ropes,
    one_rope,
    partial_rope,
    rope_of_sliding_layers,
    rotating_layers,
)

LLAMA4: Mapping[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "use_qk_norm": True,
}
"""Defaults of transformers for its text part."""
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_GROWTH = "llama_4_scaling_beta"


def llama4_sizes(fields: Fields) -> dict[str, Any]:
    """Return the size of an MLP under its usual name, and that of an expert under another."""
    return {
        "intermediate_size": fields.raw.get("intermediate_size_mlp"),
        "expert_intermediate_size": fields.raw.get("intermediate_size"),
    }


def llama4_windows(fields: Fields, layers: int) -> Windows:
    """Return chunks of `attention_chunk_size`, as negative windows, for the layers of `layer_types`, or for
    those with RoPE.
    """
    types = fields.raw.get("layer_types")
    if types is None:
        types = [_CHUNKED if turns else _FULL for turns in rotating_layers(fields, layers)]
    types = fields.layer_types(types, layers, _CHUNKED, _FULL)
    size = fields.integer("attention_chunk_size") if _CHUNKED in types else 0
    return tuple(-size if name == _CHUNKED else None for name in types)


def llama4_ropes(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return a RoPE of neighboring pairs, and none for some layers, whose queries grow with their
    position.
    """
    (rope,), _ = interleaved_rope(fields, head_dim, positions, layers)
    still = RopeConfig(rotary_dim=0)
    tuning = fields.raw.get("attn_temperature_tuning", True)
    if type(tuning) not in (bool, int):
        raise fields.error(f"attn_temperature_tuning must be true or false, not {tuning!r}")
    if tuning:
        growth, floor = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
        if not 0.0 <= growth <= 65536.0:
            raise fields.error(f"attn_scale {growth} must be from 0 to 65536")
        still = replace(still, query_growth=growth, original_context=floor, growth_start=1)
    return (rope, still), tuple(0 if turns else 1 for turns in rotating_layers(fields, layers))


def llama4_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read experts whose inputs are scaled by the sigmoid of their logit, beside a shared expert."""
    count, per_token = selected_of(fields, "num_local_experts")
    sparse = fields.raw.get("moe_layers")
    if sparse is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        sparse = list(range(step - 1, layers, step))
    if not (sparse := fields.layer_numbers("moe_layers", sparse, layers)):
        return None
    inner = fields.integer("expert_intermediate_size")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=inner,
        normalized=False,
        layers=tuple(layer in sparse for layer in range(layers)),
        scoring="sigmoid",
        scales_inputs=True,
        shared_inner=inner,
        router="router",
        shared="shared_expert",
        stacked=StackedExperts(is_transposed=True, turns_adapters=True),
    )


def phimoe_experts(fields: Fields, layers: int) -> ExpertsConfig:
    """Read experts that SparseMixer selects."""
    count, per_token = selected_of(fields, "num_local_experts")
    jitter = fields.number("router_jitter_noise", 0.01)
    if not 0.0 < jitter <= 1.0:
        raise fields.error(f"router_jitter_noise {jitter} must be more than 0 and at most 1")
    if per_token != 2:
        raise fields.error(f"num_experts_per_tok {per_token} is not supported of this architecture, only 2")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=fields.integer("intermediate_size"),
        normalized=False,
        layers=(True,) * layers,
        jitter=jitter,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def afmoe_scales(fields: Fields) -> Scales:
    is_scaled = fields.flag("mup_enabled", default=False)
    return Scales(embedding=fields.integer("hidden_size") ** 0.5 if is_scaled else 1.0)


def mistral4_ropes(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return the RoPE of latent attention, and a table that turns nothing: by it whole queries grow with
    their position.
    """
    raw = raw_rope(fields)
    rope = Fields(raw, f"{fields.where}: rope parameters")
    growth, original = rope.number(_GROWTH, 0.0), rope.integer("original_max_position_embeddings", positions)
    if not 0.0 <= growth <= MAX_FACTOR:
        raise rope.error(f"{_GROWTH} {growth} must be from 0 to {MAX_FACTOR:.0f}")
    if (sizes := deepseek_latent(fields)).nope % sizes.rope:
        raise fields.error(
            f"qk_nope_head_dim {sizes.nope} is not a multiple of qk_rope_head_dim {sizes.rope}"
        )
    others = {key: value for key, value in raw.items() if key not in {_GROWTH, "partial_rotary_factor"}}
    # The part is that of a whole query. All dimensions of the rotated part are rotated.
    changed = {"rope_parameters": others, "rope_scaling": None, "partial_rotary_factor": None}
    plain = fields.replace(**changed)
    ropes, layer_ropes = deepseek_rope(plain, head_dim, positions, layers)
    if not growth:
        return ropes, layer_ropes
    grown = RopeConfig(rotary_dim=0, query_growth=growth, original_context=original, of_queries=True)
    return (*ropes, grown), layer_ropes


def mistral4_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read a softmax router with groups, of which two experts count, beside shared experts."""
    found = refuse_small_groups(fields, deepseek_experts(fields, layers, group_best=2))
    return replace(found, stacked=StackedExperts()) if any(found.layers) else None


def refuse_clipping(fields: Fields) -> None:
    if fields.raw.get("clip_qkv") is not None:
        raise fields.error("clip_qkv is not supported")


def minicpm3_sizes(fields: Fields) -> dict[str, Any]:
    usual = fields.integer("hidden_size") // fields.integer("num_attention_heads") or 1
    value = fields.integer("v_head_dim", usual)
    return {"v_head_dim": value, **deepseek_sizes(fields.replace(v_head_dim=value))}


def minicpm3_scales(fields: Fields) -> Scales:
    """Return multipliers of embeddings, of what layers add and of logits, beside that of attention."""
    layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    residual = fields.number("scale_depth", layers**0.5) / layers**0.5
    base = fields.integer("dim_model_base", hidden)
    if residual <= 0:
        raise fields.error(f"scale_depth {fields.raw['scale_depth']} must be larger than 0")
    embedding = fields.number("scale_emb", 1.0) / residual
    return replace(deepseek_scales(fields), embedding=embedding, residual=residual, logits=base / hidden)


def refuse_other_ling(fields: Fields) -> None:
    for key in ("moe_router_enable_expert_bias", "norm_topk_prob"):
        if not fields.flag(key, default=True):
            raise fields.error(f"{key} false is not supported of a Ling")


def refuse_other_afmoe(fields: Fields) -> None:
    usual = {"attention_bias": False, "score_func": "sigmoid", "route_norm": True}
    fields.refuse_others(usual, "of an AFMoE")


_LLAMA4 = Architecture(
    model_type="llama4_text",
    defaults=LLAMA4,
    head_dim=128,
    attention_bias=True,
    qk_norm="no_weight",
    qk_norm_flag="use_qk_norm",
    norms_after_rope=True,
    sizes=llama4_sizes,
    windows=llama4_windows,
    ropes=llama4_ropes,
    experts=llama4_experts,
    names={"mlp": "feed_forward"},
)
_PHIMOE = Architecture(
    model_type="phimoe",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 16, "num_experts_per_tok": 2},
    attention_bias=True,
    block="layer_norm",
    head_bias_flag="lm_head_bias",
    windows=one_window,
    ropes=one_rope,
    experts=phimoe_experts,
    own_code="modeling_phimoe.PhiMoEForCausalLM",
)
_OLMO2 = Architecture(
    model_type="olmo2",
    defaults={"rms_norm_eps": 1e-5},
    attention_bias=True,
    qk_norm="width",
    block="post_norm",
    refuse=refuse_clipping,
)
MISTRAL4 = Architecture(
    model_type="mistral4",
    defaults={
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            _GROWTH: 0.1,
        },
    },
    sizes=deepseek_sizes,
    latent=deepseek_latent,
    scales=deepseek_scales,
    ropes=mistral4_ropes,
    experts=mistral4_experts,
)

OTHER_FAMILIES: dict[str, Architecture] = {
    "AfmoeForCausalLM": Architecture(
        model_type="afmoe",
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 1024,
            "global_attn_every_n_layers": 4,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "moe_intermediate_size": 1408,
        },
        head_dim=128,
        qk_norm="heads",
        attention_gate="gate_proj",
        block="sandwich",
        sizes=types_by_pattern,
        windows=windows_by_type,
        ropes=rope_of_sliding_layers,
        experts=experts_with(deepseek_v3_experts, router="router.gate", correction="expert_bias"),
        scales=afmoe_scales,
        aliases={
            "sliding_window_pattern": "global_attn_every_n_layers",
            "first_k_dense_replace": "num_dense_layers",
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "routed_scaling_factor": "route_scale",
        },
        names={
            "pre_feedforward_layernorm": "pre_mlp_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
        own_code="modeling_afmoe.AfmoeForCausalLM",
        refuse=refuse_other_afmoe,
    ),
    "BailingMoeV2ForCausalLM": Architecture(
        model_type="bailing_moe",
        defaults={
            "rope_theta": 600000.0,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "n_group": 8,
            "topk_group": 4,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 512,
            "first_k_dense_replace": 1,
        },
        attention_bias=True,
        qk_norm="heads",
        qk_norm_flag="use_qk_norm",
        has_stacked_projections=True,
        ropes=partial_rope,
        experts=deepseek_v3_experts,
        aliases={
            "attention_bias": "use_qkv_bias",
            "attention_out_bias": "use_bias",
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "scoring_func": "score_function",
        },
        own_code="modeling_bailing_moe_v2.BailingMoeV2ForCausalLM",
        refuse=refuse_other_ling,
    ),
    "MiniCPM3ForCausalLM": Architecture(
        model_type="minicpm3",
        defaults={
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        sizes=minicpm3_sizes,
        latent=deepseek_latent,
        scales=minicpm3_scales,
        ropes=partial_rope,
        own_code="modeling_minicpm.MiniCPM3ForCausalLM",
    ),
    "Mistral4ForCausalLM": MISTRAL4,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        model_type="olmo3",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
        windows=windows_by_type,
        ropes=olmo3_ropes,
    ),
    "FlexOlmoForCausalLM": replace(
        _OLMO2, model_type="flex_olmo", defaults={"rope_theta": 500000.0}, experts=olmoe_experts
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(_LLAMA4, is_nested=True),
    "PhimoeForCausalLM": _PHIMOE,
    "PhiMoEForCausalLM": _PHIMOE,
}
