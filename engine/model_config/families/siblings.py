"""Families that differ from others by few rules: Arcee, CWM, dots.llm1, K-EXAONE, Granite MoE, Helium,
Hunyuan, Hy3, HyperCLOVA X, Mellum 2, Ministral, Qwen-VL and Solar Open.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import attention, moe, rope
from ..architecture import RELU2, Architecture, spelled
from ..attention import FULL, SLIDING, Scales, Windows
from ..fields import Fields
from ..moe import ExpertsConfig, StackedExperts
from ..recurrent.families import granite_sizes
from ..rope import LayerRopes, RopeConfig

_LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
_MELLUM_ROPES: Mapping[str, Any] = {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}}


types_first_of_four = attention.types_where(lambda layer, _layers: layer % 4 == 0)


def refuse_shared_layers(fields: Fields) -> None:
    if fields.flag("use_cla", default=False):
        raise fields.error("use_cla is not supported: layers that share keys and values of others")


def refuse_without_post_norms(fields: Fields) -> None:
    if not fields.flag("use_post_norm", default=True):
        raise fields.error("use_post_norm false is not supported")


def dots1_windows(fields: Fields, layers: int) -> Windows:
    """Return windows by `layer_types`, or from `max_window_layers` on."""
    most = {"use_sliding_window": True, "max_window_layers": fields.number("max_window_layers", layers)}
    return attention.windows_of_later_layers(fields.replace(**most), layers)


def ropes_by_theta(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return a RoPE for each base in `layer_rope_theta`, of which 0 is none (NoPE)."""
    base = rope.parse_rope(fields, head_dim, positions)
    bases = (
        fields.numbers("layer_rope_theta") if fields.raw.get("layer_rope_theta") else (base.theta,) * layers
    )
    if len(bases) != layers or not all(theta == 0 or 1 < theta <= 1e15 for theta in bases):
        raise fields.error(f"layer_rope_theta must have {layers} numbers, each 0 or larger than 1")
    known = sorted(set(bases), reverse=True)
    ropes = [replace(base, theta=theta) if theta else RopeConfig(rotary_dim=0) for theta in known]
    return tuple(ropes), tuple(known.index(theta) for theta in bases)


def granite_scales(fields: Fields) -> Scales:
    residual = attention.multiplier(fields, "residual_multiplier")
    return Scales(
        embedding=attention.multiplier(fields, "embedding_multiplier") / residual,
        attention=attention.multiplier(fields, "attention_multiplier"),
        residual=residual,
        logits=1 / attention.multiplier(fields, "logits_scaling"),
    )


def hyperclova_scales(fields: Fields) -> Scales:
    """Return the multipliers of a Granite, but for logits, which are multiplied."""
    found = granite_scales(fields)
    scores = found.attention if fields.raw.get("attention_multiplier") is not None else None
    return replace(found, attention=scores, logits=attention.multiplier(fields, "logits_scaling"))


def granite_shared_sizes(fields: Fields) -> Mapping[str, Any]:
    return granite_sizes(fields) if fields.raw.get("shared_intermediate_size") else {}


def granite_swa_sizes(fields: Fields) -> Mapping[str, Any]:
    return {**granite_shared_sizes(fields), **types_first_of_four(fields)}


def layers_without_dense(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer that `mlp_layer_types` calls sparse, by default for all."""
    return moe.layers_after_dense(fields.replace(first_k_dense_replace=0, moe_layer_freq=1), layers)


def granite_shared_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read experts, beside an MLP of each layer where `shared_intermediate_size` is not 0."""
    has_mlp = fields.raw.get("expert_intermediate_size") is not None
    return (moe.granite_hybrid_experts if has_mlp else moe.granite_moe_experts)(fields, layers)


def granite_swa_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read the same under the names that transformers 5 gives experts."""
    found = granite_shared_experts(fields, layers)
    at = "" if found is None or found.module else "block_sparse_moe."
    stacked = StackedExperts(gate_up=f"{at}experts.gate_up_proj", down=f"{at}experts.down_proj")
    return found and replace(found, router=f"{at}router", stacked=stacked)


def same_in_all_layers(fields: Fields) -> tuple[int, int]:
    """Read the numbers of experts, which may be lists with the same number for each layer."""
    layers, same = fields.integer("num_hidden_layers"), dict[str, object]()
    for key in ("num_experts", "moe_topk"):
        each = fields.raw.get(key)
        if isinstance(each, list):
            if len(each) < layers or len(set(each[:layers])) != 1:
                raise fields.error(f"{key} must be the same for each of {layers} layers")
            same[key] = each[0]
    return moe.selected_by("num_experts", top_k="moe_topk")(fields.replace(**same))


_HUNYUAN = Architecture(
    model_type="hunyuan_v1_dense",
    defaults={"rms_norm_eps": 1e-5},
    attention_bias=True,
    qk_norm="heads",
    norms_after_rope=True,
    ropes=rope.rope_of_alpha,
    names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
    refuse=refuse_shared_layers,
)
_GRANITE_SHARED = Architecture(
    model_type="granitemoeshared",
    attention_bias=True,
    has_stacked_mlp=True,
    scales=granite_scales,
    sizes=granite_shared_sizes,
    experts=granite_shared_experts,
    names={"mlp": "shared_mlp", "gate_up_proj": "input_linear", "down_proj": "output_linear"},
)
_SWA_EXPERTS = tuple(
    f"{at}experts.{part}_proj" for at in ("", "block_sparse_moe.") for part in ("gate_up", "down")
)
_QWEN2_VL = Architecture(
    model_type="qwen2_vl_text",
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 1e6},
    qkv_bias=True,
    windows=attention.windows_of_later_layers,
    ropes=rope.rope_of_texts(rope.one_rope),
    is_nested=True,
)
_QWEN3_VL = Architecture(
    model_type="qwen3_vl_text",
    defaults={"rope_theta": 5e5},
    head_dim=128,
    attention_bias=True,
    qk_norm="heads",
    ropes=rope.rope_of_texts(rope.one_rope),
    is_nested=True,
)

SIBLINGS: dict[str, Architecture] = {
    "ArceeForCausalLM": Architecture(
        model_type="arcee",
        defaults={"rms_norm_eps": 1e-5},
        hidden_acts=RELU2,
        fits_float16=False,
        attention_bias=True,
        mlp_bias=True,
    ),
    "CwmForCausalLM": Architecture(
        model_type="cwm",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": 8192,
            "rope_parameters": _LLAMA3_ROPE,
        },
        head_dim=128,
        mlp_bias=True,
        sizes=types_first_of_four,
        windows=attention.windows_by_type,
    ),
    "Dots1ForCausalLM": Architecture(
        model_type="dots1",
        defaults={"sliding_window": 4096, "norm_topk_prob": False, "first_k_dense_replace": 0},
        attention_bias=True,
        qk_norm="heads",
        windows=dots1_windows,
        experts=moe.deepseek_v3_experts,
    ),
    "ExaoneMoeForCausalLM": Architecture(
        model_type="exaone_moe",
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
        },
        qk_norm="heads",
        sizes=attention.types_by_pattern,
        windows=attention.windows_by_type,
        ropes=rope.rope_of_sliding_layers,
        experts=moe.experts_with(moe.deepseek_v3_experts, correction="e_score_correction_bias"),
        aliases={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    ),
    "GraniteMoeSharedForCausalLM": _GRANITE_SHARED,
    "GraniteSWAForCausalLM": Architecture(
        model_type="granite_swa",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 128, "tie_word_embeddings": True},
        attention_bias=True,
        mlp_bias=True,
        has_sinks=True,
        scales=granite_scales,
        sizes=types_first_of_four,
        windows=attention.windows_by_type,
        ropes=ropes_by_theta,
    ),
    "GraniteMoeSWAForCausalLM": replace(
        _GRANITE_SHARED,
        model_type="granitemoe_swa",
        defaults={"sliding_window": 128},
        has_sinks=True,
        sizes=granite_swa_sizes,
        experts=granite_swa_experts,
        names={**_GRANITE_SHARED.names, **{name: name for name in _SWA_EXPERTS}},
        windows=attention.windows_by_type,
        ropes=ropes_by_theta,
    ),
    "HeliumForCausalLM": Architecture(
        model_type="helium",
        defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5, "attention_out_bias": False},
        head_dim=128,
        attention_bias=True,
        mlp_bias=True,
        ropes=rope.interleaved_rope,
    ),
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": replace(
        _HUNYUAN,
        model_type="hunyuan_v1_moe",
        experts=moe.read_experts(
            same_in_all_layers,
            inner="intermediate_size",
            normalized=True,
            shared_inner=moe.integer("intermediate_size"),
            router="gate.wg",
            shared="shared_mlp",
        ),
    ),
    "HYV3ForCausalLM": Architecture(
        model_type="hy_v3",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "num_nextn_predict_layers": 1,
        },
        head_dim=128,
        attention_bias=True,
        qk_norm="heads",
        experts=moe.experts_with(
            moe.deepseek_v3_experts, router="router.gate", correction="expert_bias", shared="shared_mlp"
        ),
        aliases=spelled(
            "n_routed_experts=num_experts n_shared_experts=num_shared_experts "
            "routed_scaling_factor=router_scaling_factor"
        ),
    ),
    "HyperCLOVAXForCausalLM": Architecture(
        model_type="hyperclovax",
        attention_bias=True,
        mlp_bias=True,
        block="sandwich",
        scales=hyperclova_scales,
        names=spelled(
            "post_attention_layernorm=post_norm1 pre_feedforward_layernorm=post_attention_layernorm "
            "post_feedforward_layernorm=post_norm2"
        ),
        own_code="modeling_hyperclovax.HyperCLOVAXForCausalLM",
        refuse=refuse_without_post_norms,
    ),
    "MellumForCausalLM": Architecture(
        model_type="mellum",
        defaults={"sliding_window": 1024, "norm_topk_prob": True, "rope_parameters": _MELLUM_ROPES},
        head_dim=128,
        attention_bias=True,
        qk_norm="heads",
        sizes=attention.types_where(lambda _layer, _layers: True),
        windows=attention.windows_by_type,
        ropes=rope.olmo3_ropes,
        experts=moe.read_experts(
            moe.softmax_over_all, layers_without_dense, normalized=moe.normalized_if(False)
        ),
    ),
    "MinistralForCausalLM": Architecture(
        model_type="ministral",
        defaults={"sliding_window": 4096},
        sizes=attention.types_where(lambda _layer, _layers: False),
        windows=attention.windows_by_type,
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": replace(_QWEN2_VL, model_type="qwen2_5_vl_text"),
    **dict.fromkeys(
        (
            "Qwen2_5OmniForConditionalGeneration",
            "Qwen2_5OmniThinkerForConditionalGeneration",
            "Qwen2_5OmniForCausalLM",
        ),
        replace(
            _QWEN2_VL,
            model_type="qwen2_5_omni_text",
            defaults={"sliding_window": 32768, "rope_theta": 1e6, "tie_word_embeddings": True},
        ),
    ),
    **dict.fromkeys(
        ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        Architecture(
            model_type="qwen3_omni_moe_text",
            defaults={"rope_theta": 1e6, "num_experts": 128, "norm_topk_prob": True},
            attention_bias=True,
            qk_norm="heads",
            ropes=rope.rope_of_texts(rope.one_rope),
            experts=moe.qwen3_moe_experts,
            is_nested=True,
        ),
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_VL,
        model_type="qwen3_vl_moe_text",
        defaults={
            **_QWEN3_VL.defaults,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
        aliases={"num_experts": "num_local_experts"},
        windows=attention.windows_if_used,
        experts=moe.experts_with(moe.qwen3_moe_experts, stacked=StackedExperts(is_transposed=True)),
    ),
    "SolarOpenForCausalLM": Architecture(
        model_type="solar_open",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "intermediate_size": 1,
            "attention_out_bias": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
        },
        head_dim=128,
        attention_bias=True,
        experts=moe.deepseek_v3_experts,
    ),
}
"""Siblings by the class name in `architectures` of config.json."""
