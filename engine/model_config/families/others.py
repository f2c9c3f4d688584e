"""Llama 4, AFMoE, Flint, Kolibri 1, Ling 2.0, OLMo 2 and 3, FlexOlmo and Phi-MoE, the language models of
Idefics3, SmolVLM, GLM-4V, GLM-OCR, PaddleOCR-VL, Cohere Compass and InternVL, and Llamas under other names,
DeciLM, EXAONE 3, InternLM 2 and 3 and IQuest-Coder: defaults, rules and entries of `registry.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import attention, moe, rope
from ..architecture import Architecture, four_times_hidden, refuse_options, spelled
from ..attention import Scales, Windows
from ..fields import Fields
from ..moe import W123, StackedExperts
from ..rope import LayerRopes, RopeConfig

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
        types = [_CHUNKED if turns else _FULL for turns in rope.rotating_layers(fields, layers)]
    types = fields.layer_types(types, layers, _CHUNKED, _FULL)
    size = fields.integer("attention_chunk_size") if _CHUNKED in types else 0
    return tuple(-size if name == _CHUNKED else None for name in types)


def cohere_compass_ropes(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return a RoPE for each type of layers in `rope_parameters`, or none (NoPE) where that is null."""
    raw, types = fields.mapping("rope_parameters") or {}, attention.layer_types(fields, layers)
    names = list(dict.fromkeys(types))
    if not raw.keys() >= set(names):
        raise fields.error("rope_parameters must have an entry for each type in layer_types")
    by_type = Fields(raw, f"{fields.where}: rope_parameters")

    def read(name: str) -> RopeConfig:
        if raw[name] is None:
            return RopeConfig(rotary_dim=0)
        one = rope.rope_of_type(by_type, name)
        one = {key: value for key, value in one.items() if not key.startswith("mrope")}
        return rope.whole_heads(one, fields, head_dim, positions)

    return tuple(map(read, names)), tuple(map(names.index, types))


def llama4_ropes(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return a RoPE of neighboring pairs, and none for some layers, whose queries grow with their
    position.
    """
    (turned,), _ = rope.interleaved_rope(fields, head_dim, positions, layers)
    still = RopeConfig(rotary_dim=0)
    tuning = fields.raw.get("attn_temperature_tuning", True)
    if type(tuning) not in (bool, int):
        raise fields.error(f"attn_temperature_tuning must be true or false, not {tuning!r}")
    if tuning:
        growth, floor = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
        if not 0.0 <= growth <= 65536.0:
            raise fields.error(f"attn_scale {growth} must be from 0 to 65536")
        still = replace(still, query_growth=growth, original_context=floor, growth_start=1)
    return (turned, still), tuple(0 if turns else 1 for turns in rope.rotating_layers(fields, layers))


def llama4_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for the layers of `moe_layers`, or for each `interleave_moe_layer_step`-th."""
    sparse = fields.raw.get("moe_layers")
    if sparse is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        sparse = list(range(step - 1, layers, step))
    sparse = fields.layer_numbers("moe_layers", sparse, layers)
    return tuple(layer in sparse for layer in range(layers))


def phimoe_jitter(fields: Fields) -> float:
    jitter = fields.number("router_jitter_noise", 0.01)
    if not 0.0 < jitter <= 1.0:
        raise fields.error(f"router_jitter_noise {jitter} must be more than 0 and at most 1")
    return jitter


def kolibri1_sizes(fields: Fields) -> dict[str, Any]:
    """Return the size of an MLP, which no layer has, and the types of layers."""
    return {
        "intermediate_size": fields.integer("shared_expert_intermediate_size"),
        **attention.types_every(5)(fields),
    }


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
    experts=moe.read_experts(
        moe.selected_by("num_local_experts"),
        llama4_layers,
        inner="expert_intermediate_size",
        normalized=False,
        scoring="sigmoid",
        scales_inputs=True,
        shared_inner=moe.integer("expert_intermediate_size"),
        router="router",
        shared="shared_expert",
        stacked=StackedExperts(is_transposed=True, turns_adapters=True),
    ),
    names={"mlp": "feed_forward"},
)
_PHIMOE = Architecture(
    model_type="phimoe",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 16, "num_experts_per_tok": 2},
    attention_bias=True,
    block="layer_norm",
    head_bias_flag="lm_head_bias",
    windows=attention.one_window,
    ropes=rope.one_rope,
    experts=moe.read_experts(
        moe.selected_by("num_local_experts"),
        inner="intermediate_size",
        normalized=False,
        jitter=phimoe_jitter,
        module="block_sparse_moe",
        projections=W123,
    ),
    own_code="modeling_phimoe.PhiMoEForCausalLM",
    refuse=refuse_options(num_experts_per_tok=2),
)
_OLMO2 = Architecture(
    model_type="olmo2",
    defaults={"rms_norm_eps": 1e-5},
    attention_bias=True,
    qk_norm="width",
    block="post_norm",
    refuse=refuse_options(clip_qkv=None),
)
_LLAMA_INSIDE = Architecture(model_type="llama", attention_bias=True, mlp_bias=True, is_nested=True)


_GLM_OCR = Architecture(
    model_type="glm_ocr_text",
    defaults={"rms_norm_eps": 1e-5},
    block="sandwich",
    has_stacked_mlp=True,
    ropes=rope.rope_of_texts(rope.interleaved_rope),
    is_nested=True,
    names=spelled(
        "post_attention_layernorm=post_self_attn_layernorm "
        "pre_feedforward_layernorm=post_attention_layernorm post_feedforward_layernorm=post_mlp_layernorm"
    ),
)
_GLM4V = replace(_GLM_OCR, model_type="glm4v_text", qkv_bias=True)
_PADDLEOCR_VL = Architecture(
    model_type="paddleocr_vl_text",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    head_dim=128,
    attention_bias=True,
    mlp_bias=True,
    ropes=rope.rope_of_texts(rope.one_rope),
    aliases={"attention_bias": "use_bias", "mlp_bias": "use_bias"},
    is_nested=True,
    own_code="modeling_paddleocr_vl.PaddleOCRVLForConditionalGeneration",
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
        sizes=attention.types_by_pattern,
        windows=attention.windows_by_type,
        ropes=rope.rope_of_sliding_layers,
        experts=moe.experts_with(moe.deepseek_v3_experts, router="router.gate", correction="expert_bias"),
        scales=lambda fields: Scales(
            embedding=attention.root_of_width_if(fields, "mup_enabled", default=False)
        ),
        aliases=spelled(
            "sliding_window_pattern=global_attn_every_n_layers first_k_dense_replace=num_dense_layers "
            "n_routed_experts=num_experts n_shared_experts=num_shared_experts "
            "routed_scaling_factor=route_scale"
        ),
        names=spelled(
            "pre_feedforward_layernorm=pre_mlp_layernorm post_feedforward_layernorm=post_mlp_layernorm"
        ),
        own_code="modeling_afmoe.AfmoeForCausalLM",
        refuse=refuse_options(attention_bias=False, score_func="sigmoid", route_norm=True),
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
        ropes=rope.partial_rope,
        experts=moe.deepseek_v3_experts,
        aliases=spelled(
            "attention_bias=use_qkv_bias attention_out_bias=use_bias n_routed_experts=num_experts "
            "n_shared_experts=num_shared_experts scoring_func=score_function"
        ),
        own_code="modeling_bailing_moe_v2.BailingMoeV2ForCausalLM",
        refuse=refuse_options(moe_router_enable_expert_bias=True, norm_topk_prob=True),
    ),
    "FlintForCausalLM": Architecture(
        model_type="flint",
        defaults={"sliding_window": 513, "mlp_only_layers": [0, 1]},
        head_dim=128,
        attention_bias=True,
        has_sinks=True,
        qk_norm="heads",
        sizes=attention.types_where(lambda n, layers: n < 2 or n % 4 == 1 or n == layers - 1),
        windows=attention.windows_by_type,
        ropes=rope.rope_of_sliding_layers,
        experts=moe.experts_beside_shared(
            moe.sparse_layers, normalized=moe.normalized_if(True), scoring="sigmoid", shared="shared_expert"
        ),
        names={"sinks": "softmax_offset"},
    ),
    "Kolibri1ForCausalLM": Architecture(
        model_type="kolibri1",
        defaults={"sliding_window": 513},
        head_dim=128,
        qk_norm="heads",
        block="sandwich",
        sizes=kolibri1_sizes,
        windows=attention.windows_by_type,
        ropes=rope.rope_of_sliding_layers,
        experts=moe.experts_beside_shared(
            normalized=moe.normalized_if(False),
            scoring="sigmoid_of_logits",
            correction="gate.e_score_correction_bias",
        ),
        names=spelled(
            "post_attention_layernorm=post_attn_norm pre_feedforward_layernorm=post_attention_layernorm "
            "post_feedforward_layernorm=post_ffn_norm"
        ),
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        model_type="olmo3",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
        windows=attention.windows_by_type,
        ropes=rope.olmo3_ropes,
    ),
    "FlexOlmoForCausalLM": replace(
        _OLMO2, model_type="flex_olmo", defaults={"rope_theta": 500000.0}, experts=moe.olmoe_experts
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(_LLAMA4, is_nested=True),
    "PhimoeForCausalLM": _PHIMOE,
    "PhiMoEForCausalLM": _PHIMOE,
    "Idefics3ForConditionalGeneration": _LLAMA_INSIDE,
    "SmolVLMForConditionalGeneration": _LLAMA_INSIDE,
    "GlmOcrForConditionalGeneration": _GLM_OCR,
    "PaddleOCRVLForConditionalGeneration": _PADDLEOCR_VL,
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm46VForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": Architecture(
        model_type="glm4v_moe_text",
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "attention_out_bias": False,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
        },
        attention_bias=True,
        ropes=rope.rope_of_texts(rope.partial_rope),
        experts=moe.deepseek_v3_experts,
        is_nested=True,
    ),
    "DeciLMForCausalLM": Architecture(
        model_type="nemotron-nas",
        attention_bias=True,
        mlp_bias=True,
        sizes=attention.decilm_sizes,
        layer_sizes=attention.decilm_layers,
        own_code="modeling_decilm.DeciLMForCausalLM",
    ),
    "ExaoneForCausalLM": Architecture(
        model_type="exaone",
        defaults={
            "intermediate_size": four_times_hidden,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        aliases=spelled(
            "num_hidden_layers=num_layers hidden_act=activation_function rms_norm_eps=layer_norm_epsilon"
        ),
        own_code="modeling_exaone.ExaoneForCausalLM",
    ),
    "InternLM2ForCausalLM": Architecture(
        model_type="internlm2",
        defaults={"attention_bias": True},
        attention_bias=True,
        has_stacked_projections=True,
        stacks_by_group=True,
        aliases={"attention_bias": "bias"},
        own_code="modeling_internlm2.InternLM2ForCausalLM",
    ),
    "InternLM3ForCausalLM": Architecture(
        model_type="internlm3",
        defaults={"rms_norm_eps": 1e-5},
        head_dim=128,
        attention_bias=True,
        mlp_bias=True,
        aliases={"attention_bias": "qkv_bias", "attention_out_bias": "bias", "mlp_bias": "bias"},
        own_code="modeling_internlm3.InternLM3ForCausalLM",
    ),
    "IQuestCoderForCausalLM": Architecture(
        model_type="iquestcoder",
        defaults={"rms_norm_eps": 1e-5},
        head_dim=128,
        attention_bias=True,
        mlp_bias=True,
        own_code="modeling_iquestcoder.IQuestCoderForCausalLM",
        refuse=refuse_options(clip_qkv=None, use_sliding_window=False),
    ),
    "InternVLForConditionalGeneration": Architecture(
        model_type="internvl", is_nested=True, text_type="qwen2"
    ),
}
