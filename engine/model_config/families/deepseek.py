"""DeepSeek V1 to V3.2 and families with its latent attention (MLA): GLM-4.7-Flash and GLM-5, Kimi K2, A.X K1,
Mistral 4, MiniCPM 3 and Youtu-LLM. DeepSeek V1, Ling 1, Aria and other MiniCPMs have usual attention.
"""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

from .. import moe
from ..architecture import Architecture, refuse_options, spelled
from ..attention import IndexConfig, LatentConfig, Scales
from ..fields import Fields, raw_rope
from ..moe import StackedExperts
from ..rope import MAX_FACTOR, LayerRopes, RopeConfig, interleaved_rope, partial_rope

MAX_RANK = 1 << 14
_GROWTH = "llama_4_scaling_beta"


def deepseek_latent(fields: Fields) -> LatentConfig:
    rank = 0 if fields.raw.get("q_lora_rank") is None else fields.integer("q_lora_rank", most=MAX_RANK)
    found = LatentConfig(
        q_rank=rank,
        kv_rank=fields.integer("kv_lora_rank", most=MAX_RANK),
        nope=fields.integer("qk_nope_head_dim", most=MAX_RANK),
        rope=fields.integer("qk_rope_head_dim", most=MAX_RANK),
        value=fields.integer("v_head_dim", most=MAX_RANK),
        has_bias=fields.flag("attention_bias", default=False),
    )
    if found.rope % 2:
        raise fields.error(f"qk_rope_head_dim {found.rope} must be even")
    return found


def sparse_latent(fields: Fields, *, is_interleaved: bool = False) -> LatentConfig:
    """Read MLA with an indexer, in all layers but those that `indexer_types` calls shared."""
    found, layers = deepseek_latent(fields), fields.integer("num_hidden_layers")
    index = IndexConfig(
        heads=fields.integer("index_n_heads", most=MAX_RANK),
        dim=fields.integer("index_head_dim", most=MAX_RANK),
        top=fields.integer("index_topk"),
        layers=_indexed_layers(fields, layers),
        is_interleaved=is_interleaved,
    )
    if not found.q_rank:
        raise fields.error("q_lora_rank is missing, from which the indexer computes its queries")
    if index.dim <= found.rope:
        raise fields.error(f"index_head_dim {index.dim} must be more than qk_rope_head_dim {found.rope}")
    return replace(found, index=index)


def interleaved_sparse_latent(fields: Fields) -> LatentConfig:
    return sparse_latent(fields, is_interleaved=True)


def _indexed_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer with an indexer, by its name or letter, or by the number of layers that
    share a selection.
    """
    kinds = fields.raw.get("indexer_types") or fields.raw.get("index_topk_pattern")
    if kinds is None:
        every, first = fields.integer("index_topk_freq", 1), fields.number("index_skip_topk_offset", 2)
        return tuple(max(layer - first + 1, 0) % every == 0 for layer in range(layers))
    letters = "".join(str(kind)[:1].upper() for kind in kinds) if isinstance(kinds, (list, str)) else ""
    if not re.fullmatch(f"F[FS]{{{layers - 1},}}", letters):
        raise fields.error(f"indexer_types must be full or shared for {layers} layers, the first one full")
    return tuple(letter == "F" for letter in letters[:layers])


def sparse_sizes(fields: Fields) -> dict[str, Any]:
    """Do as `deepseek_sizes` for MLA with an indexer."""
    return {"head_dim": sparse_latent(fields).width, "num_key_value_heads": 1}


def deepseek_sizes(fields: Fields) -> dict[str, Any]:
    """Return the heads as the cache sees them: one for keys and values, of the latent's width."""
    return {"head_dim": deepseek_latent(fields).width, "num_key_value_heads": 1}


def deepseek_scales(fields: Fields) -> Scales:
    scale, raw = deepseek_latent(fields).query ** -0.5, raw_rope(fields)
    rope = Fields(raw, f"{fields.where}: rope parameters")
    mscale, factor = rope.number("mscale_all_dim", 0.0), rope.number("factor", 1.0)
    if raw.get("rope_type", raw.get("type", "default")) != "default" and mscale and factor > 1:
        scale *= (0.1 * mscale * math.log(factor) + 1) ** 2
    return Scales(attention=scale)


def deepseek_rope(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return one RoPE, of neighboring pairs unless `rope_interleave` is false."""
    interleaved = fields.flag("rope_interleave", default=True)
    return (interleaved_rope if interleaved else partial_rope)(fields, head_dim, positions, layers)


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


def minicpm3_sizes(fields: Fields) -> dict[str, Any]:
    usual = fields.integer("hidden_size") // fields.integer("num_attention_heads") or 1
    value = fields.integer("v_head_dim", usual)
    return {"v_head_dim": value, **deepseek_sizes(fields.replace(v_head_dim=value))}


def minicpm_scales(fields: Fields) -> Scales:
    """Return multipliers of embeddings, of what layers add and of logits."""
    layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    residual = fields.number("scale_depth", layers**0.5) / layers**0.5
    base = fields.integer("dim_model_base", hidden)
    if residual <= 0:
        raise fields.error(f"scale_depth {fields.raw['scale_depth']} must be larger than 0")
    embedding = fields.number("scale_emb", 1.0) / residual
    return Scales(embedding=embedding, residual=residual, logits=base / hidden)


def minicpm3_scales(fields: Fields) -> Scales:
    return replace(minicpm_scales(fields), attention=deepseek_scales(fields).attention)


def refuse_other_minicpm(fields: Fields) -> None:
    fields.refuse_others({"num_experts": 0}, "of a MiniCPM")
    if fields.raw.get("sparse_config") is not None:
        raise fields.error(
            "sparse_config asks for sparse attention (InfLLM v2), which is not supported: take it out of "
            "config.json, and the model attends to all tokens"
        )


DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    defaults={
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
    },
    sizes=deepseek_sizes,
    latent=deepseek_latent,
    scales=deepseek_scales,
    ropes=deepseek_rope,
    experts=moe.deepseek_v3_experts,
    own_code="modeling_deepseek.DeepseekV3ForCausalLM",
    mtp="deepseek",
)
_DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    defaults={**DEEPSEEK_V3.defaults, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    sizes=sparse_sizes,
    latent=sparse_latent,
    own_code="",
    mtp=None,
)
_GLM5 = {"rms_norm_eps": 1e-5, "q_lora_rank": 2048, "n_group": 1, "topk_group": 1, "index_n_heads": 32}
_DEEPSEEK = Architecture(
    model_type="deepseek",
    defaults={"norm_topk_prob": False, "first_k_dense_replace": 0},
    attention_bias=True,
    experts=moe.deepseek_v1_experts,
    own_code="modeling_deepseek.DeepseekForCausalLM",
)
_ARIA = replace(
    _DEEPSEEK,
    model_type="aria_text",
    defaults={
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "intermediate_size": 4096,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
    },
    mlp_bias=True,
    experts=moe.experts_with(
        moe.deepseek_v1_experts,
        router="router",
        stacked=StackedExperts(gate_up="experts.fc1", down="experts.fc2", is_transposed=True),
    ),
    aliases=spelled(
        "moe_intermediate_size=intermediate_size n_routed_experts=moe_num_experts "
        "num_experts_per_tok=moe_topk n_shared_experts=moe_num_shared_experts"
    ),
    own_code="",
)
_KIMI_K25 = replace(DEEPSEEK_V3, is_nested=True, own_code="modeling_kimi_k25.KimiK25ForConditionalGeneration")
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
    experts=partial(moe.deepseek_experts, group_best=2, stacked=StackedExperts()),
)

DEEPSEEKS: dict[str, Architecture] = {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV2ForCausalLM": replace(
        DEEPSEEK_V3,
        model_type="deepseek_v2",
        defaults={
            "q_lora_rank": 1536,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "num_nextn_predict_layers": 0,
        },
        ropes=interleaved_rope,
        experts=moe.deepseek_v2_experts,
        own_code="modeling_deepseek.DeepseekV2ForCausalLM",
        mtp=None,
    ),
    "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": replace(
        _DEEPSEEK_V32,
        model_type="glm_moe_dsa",
        defaults={**_DEEPSEEK_V32.defaults, **_GLM5},
        latent=interleaved_sparse_latent,
    ),
    "AXK1ForCausalLM": replace(
        DEEPSEEK_V3,
        model_type="axk1",
        defaults={**DEEPSEEK_V3.defaults, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        norms_experts=True,
        own_code="modeling_axk1.AXK1ForCausalLM",
        mtp=None,
    ),
    "Glm4MoeLiteForCausalLM": replace(
        DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        defaults={
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "routed_scaling_factor": 1.8,
            "n_shared_experts": 1,
            "num_nextn_predict_layers": 1,
        },
        own_code="",
    ),
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,
    "KimiK25ForConditionalGeneration": _KIMI_K25,
    "KimiVLForConditionalGeneration": replace(
        _KIMI_K25, own_code="modeling_kimi_vl.KimiVLForConditionalGeneration"
    ),
    "DeepseekForCausalLM": _DEEPSEEK,
    "AriaTextForCausalLM": _ARIA,
    "AriaForConditionalGeneration": replace(_ARIA, is_nested=True),
    "BailingMoeForCausalLM": replace(
        _DEEPSEEK,
        model_type="bailing_moe",
        defaults={"norm_topk_prob": True, "first_k_dense_replace": 0},
        has_stacked_projections=True,
        aliases=spelled(
            "attention_bias=use_qkv_bias attention_out_bias=use_bias n_routed_experts=num_experts "
            "n_shared_experts=num_shared_experts"
        ),
        own_code="modeling_bailing_moe.BailingMoeForCausalLM",
        refuse=refuse_options(use_bias=False, norm_head=False, norm_softmax=False, multi_gate=False),
    ),
    "MiniCPMForCausalLM": Architecture(
        model_type="minicpm",
        defaults={"tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
        attention_bias=True,
        scales=minicpm_scales,
        own_code="modeling_minicpm.MiniCPMForCausalLM",
        refuse=refuse_other_minicpm,
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
    "YoutuForCausalLM": Architecture(
        model_type="youtu",
        defaults={
            "tie_word_embeddings": True,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        sizes=deepseek_sizes,
        latent=deepseek_latent,
        scales=deepseek_scales,
        ropes=deepseek_rope,
    ),
}
"""Such models by the class name in `architectures` of config.json."""
