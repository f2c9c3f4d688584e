"""Architectures whose layers are recurrent or attention, layer by layer."""

from dataclasses import replace

from .architecture import Architecture, as_it_is
from .moe import granite_hybrid_experts, lfm2_moe_experts, qwen3_5_moe_experts
from .multipliers import granite_scales
from .recurrent import (
    granite_recurrence,
    granite_sizes,
    lfm2_recurrence,
    lfm2_sizes,
    qwen3_5_recurrence,
    qwen3_next_recurrence,
)
from .rope import partial_rope, rope_if_named

_QWEN3_5 = Architecture(
    model_type="qwen3_5_text",
    defaults={
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    head_dim=256,
    attention_bias=True,
    qk_norm="heads",
    norms_add_one=True,
    has_attention_gate=True,
    ropes=partial_rope,
    recurrence=qwen3_5_recurrence,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe_text",
    defaults={
        **_QWEN3_5.defaults,
        "intermediate_size": 5632,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    experts=qwen3_5_moe_experts,
)
_LFM2 = Architecture(
    model_type="lfm2",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True},
    qk_norm="heads",
    recurrence=lfm2_recurrence,
    sizes=lfm2_sizes,
    aliases={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    names={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "norm": "embedding_norm",
    },
)

HYBRIDS: dict[str, Architecture] = {
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN3_5, is_nested=True),
    "GraniteMoeHybridForCausalLM": Architecture(
        model_type="granitemoehybrid",
        attention_bias=True,
        has_stacked_mlp=True,
        ropes=rope_if_named,
        scales=granite_scales,
        recurrence=granite_recurrence,
        experts=granite_hybrid_experts,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        sizes=granite_sizes,
        names={"mlp": "shared_mlp", "gate_up_proj": "input_linear", "down_proj": "output_linear"},
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5_MOE,
        model_type="qwen3_next",
        defaults={**_QWEN3_5_MOE.defaults, "num_experts": 512, "num_experts_per_tok": 10},
        recurrence=qwen3_next_recurrence,
    ),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_5_MOE, is_nested=True),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(_LFM2, model_type="lfm2_moe", sizes=as_it_is, experts=lfm2_moe_experts),
}
