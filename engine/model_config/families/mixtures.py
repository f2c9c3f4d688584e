"""Mixtures of experts with rules of their own: Cohere 2 MoE, Laguna, MiMo V2 Flash and
Step 3.5.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import attention, moe, rope
from ..architecture import Architecture, refuse_options, spelled
from ..attention import FULL, SLIDING, LayerSizes, Scales
from ..fields import MAX_LAYERS, Fields, raw_rope, show
from ..moe import ExpertsConfig, StackedExperts

PATTERNS = (("prefix_dense_", 1), ("", 4))


def cohere2_moe_sizes(fields: Fields) -> dict[str, Any]:
    """Return the size of an MLP, which dense layers have, that of an expert, and the kinds of layers: of each
    of the two kinds of layers every `pattern`-th has full attention.
    """
    layers, dense = fields.integer("num_hidden_layers"), int(fields.number("first_k_dense_replace", 0))
    if not 0 <= dense <= layers:
        raise fields.error(f"first_k_dense_replace {dense} must be from 0 to {layers}")
    inner = fields.integer("intermediate_size")
    found: dict[str, Any] = {
        "expert_intermediate_size": inner,
        "intermediate_size": fields.integer("prefix_dense_intermediate_size", inner),
        "first_k_dense_replace": dense,
        "has_rms_norms": fields.raw.get("rms_norm_eps") is not None,
        "rms_norm_eps": fields.number("rms_norm_eps", fields.number("layer_norm_eps", 1e-5)),
    }
    if fields.raw.get("layer_types") is None:
        every = [fields.integer(f"{at}sliding_window_pattern", usual) for at, usual in PATTERNS]
        places = [(every[0], layer) for layer in range(dense)]
        places += [(every[1], layer) for layer in range(layers - dense)]
        found["layer_types"] = [SLIDING if (layer + 1) % each else FULL for each, layer in places]
    return found


def cohere2_moe_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read experts whose mean with a shared one is taken, with a softmax or sigmoids of the chosen ones."""
    scoring = fields.text("expert_selection_fn", "softmax")
    combined = fields.text("shared_expert_combination_strategy", "average")
    if scoring not in {"softmax", "sigmoid"} or combined not in {"average", "sum"}:
        raise fields.error(
            f"expert_selection_fn {scoring!r} with shared_expert_combination_strategy {combined!r} is not "
            "supported, only softmax or sigmoid with average or sum"
        )
    shared = int(fields.number("num_shared_experts", 0))
    averages = shared > 0 and combined == "average"
    rule = moe.read_experts(
        moe.selected_by("num_experts"),
        moe.layers_after_dense,
        inner="expert_intermediate_size",
        normalized=scoring == "softmax" or moe.normalized_if(True),
        scoring=scoring,
        scale=0.5 if averages else 1.0,
        averages=averages,
        shared_inner=fields.integer("expert_intermediate_size") * shared,
    )
    return rule(fields, layers)


def cohere2_moe_still_layers(fields: Fields, layers: int) -> list[bool]:
    """Return True for layers of full attention, except for dense ones that all have full attention."""
    rotated = fields.integer("prefix_dense_sliding_window_pattern", 1) == 1
    sparse, types = moe.layers_after_dense(fields, layers), attention.layer_types(fields, layers)
    return [
        kind == FULL and (is_sparse or not rotated) for kind, is_sparse in zip(types, sparse, strict=True)
    ]


def laguna_layers(fields: Fields, layers: int) -> tuple[LayerSizes, ...]:
    """Return the sizes of layers with heads of their own; empty where all have as many."""
    if fields.raw.get("num_attention_heads_per_layer") is None:
        return ()
    heads, kv_heads = fields.numbers("num_attention_heads_per_layer"), fields.integer("num_key_value_heads")
    if set(heads) == {fields.integer("num_attention_heads")}:
        return ()
    if len(heads) != layers or not all(each > 0 and each % kv_heads == 0 for each in heads):
        raise fields.error(
            f"num_attention_heads_per_layer must have {layers} multiples of num_key_value_heads {kv_heads}"
        )
    inner, head_dim = fields.integer("intermediate_size"), fields.integer("head_dim", 128)
    return tuple(
        LayerSizes(kv_heads=kv_heads, head_dim=head_dim, inner=inner, kv_source=layer, heads=int(each))
        for layer, each in enumerate(heads)
    )


def laguna_variant(fields: Fields) -> dict[str, Any]:
    gating = fields.raw.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise fields.error(f"gating {show(gating)} is not supported, only per-head or per-element")
    is_wide = gating == "per-element"
    return {"attention_gate": "g_proj" if is_wide else None, "head_gate_flag": "" if is_wide else "has_gates"}


def refuse_other_laguna(fields: Fields) -> None:
    if fields.raw.get("gating") == "per-element" and fields.flag("attention_bias", default=False):
        raise fields.error("attention_bias is not supported with a gating of per-element")
    refuse_options(moe_router_logit_softcapping=0.0, moe_apply_router_weight_on_input=False)(fields)


def mimo_v2_sizes(fields: Fields) -> dict[str, Any]:
    """Return keys as transformers writes them: published files name layers by 0 and 1, and have another key
    for each kind of layer.
    """
    layers, raw = range(fields.integer("num_hidden_layers")), fields.raw
    found: dict[str, Any] = {"routed_scaling_factor": fields.number("routed_scaling_factor", 1.0)}
    if raw.get("layer_types") is None:
        is_sliding = raw.get("hybrid_layer_pattern") or [
            layer > 0 and (layer + 1) % 6 > 0 for layer in layers
        ]
        found["layer_types"] = [SLIDING if each else FULL for each in _each(fields, is_sliding)]
    if raw.get("mlp_layer_types") is None:
        is_sparse = raw.get("moe_layer_freq") or [layer > 0 for layer in layers]
        found["mlp_layer_types"] = ["sparse" if each else "dense" for each in _each(fields, is_sparse)]
    if raw.get("sliding_window_size") is not None:
        found["sliding_window"] = fields.integer("sliding_window_size") + 1
    if not raw_rope(fields).keys() & {FULL, SLIDING}:
        part = fields.number("partial_rotary_factor", 0.334)
        thetas = {FULL: fields.number("rope_theta", 5e6), SLIDING: fields.number("swa_rope_theta", 1e4)}
        ropes = {kind: {"rope_theta": each, "partial_rotary_factor": part} for kind, each in thetas.items()}
        found["rope_parameters"] = ropes
    return found


def _each(fields: Fields, kinds: Any) -> list[Any]:
    if not isinstance(kinds, list):
        raise fields.error("hybrid_layer_pattern and moe_layer_freq must have a 0 or a 1 for each layer")
    return kinds


def mimo_v2_layers(fields: Fields, layers: int) -> tuple[LayerSizes, ...]:
    """Return sizes by the type of a layer: those with a window have twice the KV heads, and sinks."""
    few, inner = fields.integer("num_key_value_heads"), fields.integer("intermediate_size")
    many = fields.integer("swa_num_key_value_heads", 2 * few)
    head_dim, value_dim = fields.integer("head_dim", 192), fields.integer("v_head_dim", 128)
    if value_dim > head_dim:
        raise fields.error(f"v_head_dim {value_dim} must be at most head_dim {head_dim}")
    if (heads := fields.integer("num_attention_heads")) % many:
        raise fields.error(f"num_attention_heads {heads} is not a multiple of {many} KV heads of some layers")
    return tuple(
        LayerSizes(
            kv_heads=many if kind == SLIDING else few,
            head_dim=head_dim,
            inner=inner,
            kv_source=layer,
            value_dim=value_dim,
            has_sinks=kind == SLIDING,
        )
        for layer, kind in enumerate(attention.layer_types(fields, layers))
    )


def refuse_other_mimo_v2(fields: Fields) -> None:
    refuse_options(add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True)(fields)
    for key in ("head_dim", "v_head_dim", "num_attention_heads"):
        if fields.raw.get(f"swa_{key}") not in (None, fields.raw.get(key)):
            raise fields.error(
                f"swa_{key} {show(fields.raw[f'swa_{key}'])} is not supported, only that of {key}"
            )


def step3p5_sizes(fields: Fields) -> dict[str, Any]:
    """Return keys as transformers writes them: published files have lists with entries of MTP layers too."""
    layers, raw, found = fields.integer("num_hidden_layers", most=MAX_LAYERS), fields.raw, dict[str, Any]()
    more = layers + int(fields.number("num_nextn_predict_layers", 0))
    for key in ("layer_types", "mlp_layer_types", *LIMITS):
        if isinstance(raw.get(key), list) and len(raw[key]) == more:
            found[key] = raw[key][:layers]
    types = found.setdefault("layer_types", raw.get("layer_types") or [FULL] * layers)
    if raw.get("mlp_layer_types") is None:
        sparse = raw.get("moe_layers_enum")
        if isinstance(sparse, str):
            sparse = [int(each) if each.strip().isdecimal() else each for each in sparse.split(",")]
        sparse = list(range(3, layers)) if sparse is None else sparse
        sparse = fields.layer_numbers("moe_layers_enum", sparse, layers)
        found["mlp_layer_types"] = ["sparse" if layer in sparse else "dense" for layer in range(layers)]
    types, ropes = fields.layer_types(types, layers, FULL, SLIDING), raw_rope(fields)
    is_by_type = ropes.keys() >= set(types)
    found["rope_parameters"] = {
        kind: ropes[kind] if is_by_type else _step3p5_rope(fields, types, kind) for kind in sorted(set(types))
    }
    return found | {"rope_theta": None, "rope_scaling": None}


def _step3p5_rope(fields: Fields, types: list[str], kind: str) -> dict[str, Any]:
    """Return the RoPE of a type, from lists with an entry for each layer. Only full attention is scaled."""
    layer, rope = types.index(kind), {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
    for key, listed in (("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factors")):
        each = fields.raw.get(listed)
        if isinstance(each, list):
            if len(each) < len(types):
                raise fields.error(f"{listed} must have a number for each of {len(types)} layers")
            each = each[layer]
        rope |= {} if each is None else {key: each}
    return {**rope, **((fields.mapping("rope_scaling") or {}) if kind == FULL else {})}


def step3p5_layers(fields: Fields, layers: int) -> tuple[LayerSizes, ...]:
    """Return sizes by the type of a layer, which may have other heads with a window, and limits of gates."""
    kv_heads, head_dim = fields.integer("num_key_value_heads"), fields.integer("head_dim", 128)
    other = Fields(
        fields.mapping("attention_other_setting") or {}, f"{fields.where}: attention_other_setting"
    )
    other.refuse_others({"num_attention_groups": kv_heads, "head_dim": head_dim}, "in some layers")
    usual = fields.integer("num_attention_heads")
    heads = {FULL: usual, SLIDING: other.integer("num_attention_heads", usual)}
    if fields.raw.get("num_sliding_attention_heads") is not None:
        heads[SLIDING] = fields.integer("num_sliding_attention_heads")
    if heads[SLIDING] % kv_heads:
        raise fields.error(f"{heads[SLIDING]} heads of some layers are no multiple of {kv_heads} KV heads")
    limits = [_limits(fields, key, layers) for key in LIMITS]
    inner, types = fields.integer("intermediate_size"), attention.layer_types(fields, layers)
    return tuple(
        LayerSizes(
            kv_heads=kv_heads,
            head_dim=head_dim,
            inner=inner,
            kv_source=layer,
            heads=heads[kind],
            limit=limit,
            experts_limit=experts_limit,
        )
        for layer, (kind, experts_limit, limit) in enumerate(zip(types, *limits, strict=True))
    )


def _limits(fields: Fields, key: str, layers: int) -> list[float]:
    """Return a limit of gates for each layer; 0 where there is none."""
    each = fields.raw.get(key) or [None] * layers
    if not isinstance(each, list) or len(each) != layers:
        raise fields.error(f"{key} must have a number or null for each of {layers} layers")
    found = [Fields({key: one}, fields.where).number(key, 0.0) for one in each]
    if min(found) < 0:
        raise fields.error(f"{key} must have no number below 0")
    return found


def _score_scale(fields: Fields) -> float | None:
    scalar = fields.optional_number("query_pre_attn_scalar")
    if scalar is not None and scalar <= 0:
        raise fields.error(f"query_pre_attn_scalar {scalar} must be larger than 0")
    is_usual = scalar in (None, fields.integer("head_dim", 128))
    return None if scalar is None or is_usual else scalar**-0.5


LIMITS = "swiglu_limits", "swiglu_limits_shared"
_LAGUNA_ROPES: Mapping[str, Any] = {
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_STEP3P5 = Architecture(
    model_type="step3p5",
    defaults={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "n_routed_experts": 288,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
    },
    head_dim=128,
    attention_bias=True,
    qk_norm="heads",
    norms_add_one=True,
    head_gate_flag="use_head_wise_attn_gate",
    sizes=step3p5_sizes,
    layer_sizes=step3p5_layers,
    windows=attention.windows_by_type,
    ropes=rope.partial_ropes_by_type,
    scales=lambda fields: Scales(attention=_score_scale(fields)),
    experts=moe.read_experts(
        moe.selected_by("n_routed_experts"),
        moe.layers_after_dense,
        normalized=True,
        scoring="sigmoid",
        scale=lambda fields: fields.number("moe_router_scaling_factor", 1.0),
        shared_inner=moe.integer("share_expert_dim"),
        module="",
        router="moe.gate",
        correction="moe.router_bias",
        shared="share_expert",
        stacked=StackedExperts(gate="moe.gate_proj", up="moe.up_proj", down="moe.down_proj"),
    ),
    aliases=spelled(
        "num_key_value_heads=num_attention_groups n_routed_experts=moe_num_experts "
        "num_experts_per_tok=moe_top_k share_expert_dim=share_expert_dims"
    ),
    own_code="modeling_step3p5.Step3p5ForCausalLM",
    refuse=refuse_options(
        use_head_wise_attn_gate=True,
        use_moe_router_bias=True,
        norm_expert_weight=True,
        moe_router_activation="sigmoid",
        mlp_bias=False,
        yarn_only_types=[FULL],
    ),
)

MIXTURES: dict[str, Architecture] = {
    "Step3p5ForCausalLM": _STEP3P5,
    "Step3p7ForConditionalGeneration": replace(
        _STEP3P5, is_nested=True, own_code="modeling_step3p7.Step3p7ForConditionalGeneration"
    ),
    "Cohere2MoeForCausalLM": Architecture(
        model_type="cohere2_moe",
        defaults={
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        head_dim=128,
        attention_bias=True,
        variant=lambda fields: {"block": "parallel_rms" if fields.raw["has_rms_norms"] else "parallel"},
        sizes=cohere2_moe_sizes,
        windows=attention.windows_by_type,
        ropes=rope.except_in(rope.interleaved_rope, cohere2_moe_still_layers),
        scales=attention.cohere_scales,
        experts=cohere2_moe_experts,
    ),
    "LagunaForCausalLM": Architecture(
        model_type="laguna",
        defaults={
            "sliding_window": 512,
            "first_k_dense_replace": 1,
            "rope_parameters": _LAGUNA_ROPES,
        },
        head_dim=128,
        attention_bias=True,
        qk_norm="heads",
        gate_function="softplus",
        variant=laguna_variant,
        sizes=attention.types_where(lambda _layer, _layers: True),
        layer_sizes=laguna_layers,
        windows=attention.windows_by_type,
        ropes=rope.partial_ropes_by_type,
        experts=moe.experts_beside_shared(
            moe.layers_after_dense,
            normalized=True,
            scoring="sigmoid",
            scale=lambda fields: fields.number("moe_routed_scaling_factor", 1.0),
            correction="experts.e_score_correction_bias",
            shared="shared_expert",
        ),
        own_code="modeling_laguna.LagunaForCausalLM",
        refuse=refuse_other_laguna,
    ),
    "MiMoV2FlashForCausalLM": Architecture(
        model_type="mimo_v2_flash",
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_out_bias": False,
            "attention_value_scale": 0.707,
            "sliding_window": 129,
        },
        head_dim=192,
        attention_bias=True,
        has_sinks=True,
        sizes=mimo_v2_sizes,
        layer_sizes=mimo_v2_layers,
        windows=attention.windows_by_type,
        ropes=rope.partial_ropes_by_type,
        scales=lambda fields: Scales(values=fields.number("attention_value_scale", 1.0)),
        experts=moe.deepseek_v3_experts,
        aliases={"rms_norm_eps": "layernorm_epsilon"},
        names={"sinks": "attention_sink_bias"},
        own_code="modeling_mimo_v2_flash.MiMoV2FlashForCausalLM",
        refuse=refuse_other_mimo_v2,
    ),
}
"""Such models by the class name in `architectures` of config.json."""
