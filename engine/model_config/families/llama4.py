"""Rules for Llama 4 and Phi-MoE, used by `architectures.py`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..architecture import Architecture
from ..attention import Windows, one_window
from ..fields import Fields
from ..moe import ExpertsConfig, StackedExperts, selected_of
from ..rope import LayerRopes, RopeConfig, interleaved_rope, one_rope

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


def turning_layers(fields: Fields, layers: int) -> list[bool]:
    """Return True for each layer with RoPE: those with a 1 in `no_rope_layers`, or without the list all but
    every fourth.
    """
    turns = fields.raw.get("no_rope_layers")
    if not turns:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(turns, list) or len(turns) < layers or not all(turn in (0, 1) for turn in turns):
        raise fields.error(f"no_rope_layers must have a 0 or a 1 for each of {layers} layers")
    return [bool(turn) for turn in turns[:layers]]


def llama4_windows(fields: Fields, layers: int) -> Windows:
    """Return chunks of `attention_chunk_size`, as negative windows, for the layers of `layer_types`, or for
    those with RoPE.
    """
    types = fields.raw.get("layer_types")
    if types is None:
        types = [_CHUNKED if turns else _FULL for turns in turning_layers(fields, layers)]
    if not isinstance(types, list) or len(types) != layers or not all(t in (_CHUNKED, _FULL) for t in types):
        raise fields.error(f"layer_types must name {_CHUNKED} or {_FULL} for each of {layers} layers")
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
    return (rope, still), tuple(0 if turns else 1 for turns in turning_layers(fields, layers))


def llama4_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read experts whose inputs are scaled by the sigmoid of their logit, beside a shared expert."""
    count, per_token = selected_of(fields, "num_local_experts")
    sparse = fields.raw.get("moe_layers")
    if sparse is None:
        step = fields.integer("interleave_moe_layer_step", 1)
        sparse = list(range(step - 1, layers, step))
    if not isinstance(sparse, list) or not all(type(i) is int and 0 <= i < layers for i in sparse):
        raise fields.error(f"moe_layers must be a list of layers below {layers}")
    if not sparse:
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


def phimoe_extra_params(fields: Fields) -> tuple[int, int]:
    """Return the biases of norms and of the output head."""
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size")
    return 2 * hidden, hidden + vocab * fields.flag("lm_head_bias", default=False)


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
    extra_params=phimoe_extra_params,
    own_code="modeling_phimoe.PhiMoEForCausalLM",
)

LLAMA4_AND_PHIMOE: dict[str, Architecture] = {
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(_LLAMA4, is_nested=True),
    "PhimoeForCausalLM": _PHIMOE,
    "PhiMoEForCausalLM": _PHIMOE,
}
