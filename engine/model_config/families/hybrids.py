"""Hybrids of attention and recurrent layers, as `registry.py` has the other architectures."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from .. import moe, rope
from ..architecture import RELU2, Architecture, as_it_is, four_times_hidden, refuse_options, spelled
from ..attention import Scales, multiplier, multipliers
from ..fields import Fields
from ..moe import W123, StackedExperts
from ..recurrent import families as recurrent
from ..recurrent.config import falcon_mamba_recurrence, gated_delta_nets, mamba1_recurrence, mamba1_sizes
from .deepseek import deepseek_latent, deepseek_rope, deepseek_scales, deepseek_sizes
from .siblings import granite_scales

LING_NAMES: Mapping[str, str] = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
"""Keys of Kimi-Linear and Ling 3 for those of DeepSeek."""
LFM3_ROPE: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
"""Default of transformers."""


def falcon_h1_scales(fields: Fields) -> Scales:
    """Return the multipliers of Falcon-H1. Those of attention's input and keys multiply its scores."""
    inside, width = multiplier(fields, "attention_in_multiplier"), fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // width or None)
    if inside != 1 and fields.flag("attention_bias", default=False):
        raise fields.error("attention_in_multiplier with attention_bias is not supported")
    mamba_in = multiplier(fields, "ssm_in_multiplier")
    if mamba_in != 1 and fields.flag("mamba_proj_bias", default=False):
        raise fields.error("ssm_in_multiplier with mamba_proj_bias is not supported")
    gate, down = multipliers(fields, "mlp_multipliers", 2)
    return Scales(
        embedding=multiplier(fields, "embedding_multiplier"),
        attention=head_dim**-0.5 * multiplier(fields, "key_multiplier") * inside**2,
        logits=multiplier(fields, "lm_head_multiplier"),
        mamba_in=tuple(each * mamba_in for each in multipliers(fields, "ssm_multipliers", 5)),
        mamba_out=multiplier(fields, "ssm_out_multiplier"),
        attention_out=inside * multiplier(fields, "attention_out_multiplier"),
        mlp=(gate, down),
    )


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
    attention_gate="q_proj",
    ropes=rope.partial_rope,
    recurrence=partial(gated_delta_nets, is_interleaved=False),
    mtp="qwen",
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
    experts=moe.experts_with(moe.qwen2_moe_experts, stacked=StackedExperts()),
)
_LFM2 = Architecture(
    model_type="lfm2",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True},
    qk_norm="heads",
    recurrence=recurrent.lfm2_recurrence,
    sizes=recurrent.lfm2_sizes,
    aliases={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    names=spelled(
        "input_layernorm=operator_norm post_attention_layernorm=ffn_norm mlp=feed_forward gate_proj=w1 "
        "up_proj=w3 down_proj=w2 o_proj=out_proj q_norm=q_layernorm k_norm=k_layernorm norm=embedding_norm"
    ),
)
_LFM3 = Architecture(
    model_type="lfm3",
    defaults={
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": LFM3_ROPE,
    },
    head_dim=128,
    attention_bias=True,
    qk_norm="heads",
    block="sandwich",
    head_gate_flag="use_attention_gate",
    windows=recurrent.lfm3_windows,
    ropes=rope.ropes_by_type,
    recurrence=recurrent.lfm3_recurrence,
    sizes=recurrent.lfm3_sizes,
    aliases={"rms_norm_eps": "norm_eps"},
    names=spelled(
        "input_layernorm=operator_norm post_attention_layernorm=post_operator_norm "
        "pre_feedforward_layernorm=ffn_norm post_feedforward_layernorm=post_ffn_norm mlp=feed_forward "
        "gate_proj=w1 up_proj=w3 down_proj=w2 g_proj=gate_proj norm=embedding_norm"
    ),
    refuse=refuse_options(use_sandwich_norm=True),
)
_BAMBA = Architecture(
    model_type="bamba",
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    attention_bias=True,
    mlp_bias=True,
    ropes=rope.partial_rope,
    recurrence=recurrent.bamba_recurrence,
    names=spelled(
        "mlp=feed_forward post_attention_layernorm=pre_ff_layernorm "
        "model.norm.weight=model.final_layernorm.weight"
    ),
)
MAMBA2: Mapping[str, Any] = {"mamba_n_heads": 128, "mamba_n_groups": 8, "mamba_d_state": 128}
_MAMBA2_NAMES = (
    "mamba_n_groups=n_groups mamba_d_conv=conv_kernel mamba_conv_bias=use_conv_bias mamba_proj_bias=use_bias "
)
_MAMBA = Architecture(
    model_type="mamba",
    defaults={
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 1 << 18,
        "tie_word_embeddings": True,
    },
    block="single",
    ropes=rope.no_rope,
    recurrence=mamba1_recurrence,
    sizes=mamba1_sizes,
    aliases=spelled(
        "rms_norm_eps=layer_norm_epsilon mamba_expand=expand mamba_dt_rank=time_step_rank "
        "mamba_proj_bias=use_bias mamba_d_conv=conv_kernel mamba_conv_bias=use_conv_bias "
        "mamba_d_state=state_size"
    ),
    names={"input_layernorm": "norm", "mamba": "mixer"},
)

HYBRIDS: dict[str, Architecture] = {
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN3_5, is_nested=True),
    "GraniteMoeHybridForCausalLM": Architecture(
        model_type="granitemoehybrid",
        attention_bias=True,
        has_stacked_mlp=True,
        ropes=rope.rope_if_named,
        scales=granite_scales,
        recurrence=recurrent.granite_recurrence,
        experts=moe.granite_hybrid_experts,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
        sizes=recurrent.granite_sizes,
        names={"mlp": "shared_mlp", "gate_up_proj": "input_linear", "down_proj": "output_linear"},
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5_MOE,
        model_type="qwen3_next",
        defaults={**_QWEN3_5_MOE.defaults, "num_experts": 512, "num_experts_per_tok": 10},
        recurrence=partial(gated_delta_nets, is_interleaved=True),
    ),
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN3_5_MOE, is_nested=True),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(_LFM2, model_type="lfm2_moe", sizes=as_it_is, experts=moe.lfm2_moe_experts),
    "Lfm3ForCausalLM": _LFM3,
    "Lfm2VlForConditionalGeneration": replace(_LFM2, is_nested=True),
    "Lfm3VlForConditionalGeneration": replace(_LFM3, is_nested=True),
    "BambaForCausalLM": _BAMBA,
    "JambaForCausalLM": replace(
        _BAMBA,
        model_type="jamba",
        defaults={"num_experts": 16, "num_experts_per_tok": 2, "max_position_embeddings": 262144},
        ropes=rope.no_rope,
        recurrence=recurrent.jamba_recurrence,
        experts=recurrent.jamba_experts,
    ),
    "MambaForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": replace(
        _MAMBA,
        model_type="falcon_mamba",
        recurrence=falcon_mamba_recurrence,
    ),
    "FalconH1ForCausalLM": replace(
        _BAMBA,
        model_type="falcon_h1",
        defaults={"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024},
        ropes=rope.one_rope,
        scales=falcon_h1_scales,
        recurrence=recurrent.falcon_h1_recurrence,
    ),
    "NemotronHForCausalLM": Architecture(
        model_type="nemotron_h",
        never_ties=True,
        defaults={
            **MAMBA2,
            "layer_norm_epsilon": 1e-5,
            "intermediate_size": 21504,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
        head_dim=128,
        hidden_acts=RELU2,
        fits_float16=False,
        mlp_bias=True,
        block="single",
        ropes=rope.no_rope,
        recurrence=recurrent.nemotron_h_recurrence,
        experts=recurrent.nemotron_h_experts,
        sizes=recurrent.nemotron_h_sizes,
        aliases=spelled(
            f"{_MAMBA2_NAMES} mamba_n_heads=mamba_num_heads mamba_d_state=ssm_state_size "
            "rms_norm_eps=layer_norm_epsilon hidden_act=mlp_hidden_act"
        ),
        names={"input_layernorm": "norm", "mamba": "mixer", "self_attn": "mixer", "mlp": "mixer"},
        own_code="modeling_nemotron_h.NemotronHForCausalLM",
        refuse=refuse_options(mamba_hidden_act="silu"),
    ),
    "Mamba2ForCausalLM": Architecture(
        model_type="mamba2",
        defaults={
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1 << 18,
            **MAMBA2,
        },
        block="single",
        ropes=rope.no_rope,
        recurrence=recurrent.mamba2_recurrence,
        sizes=recurrent.mamba2_sizes,
        aliases=spelled(
            f"{_MAMBA2_NAMES} mamba_n_heads=num_heads mamba_d_state=state_size "
            "rms_norm_eps=layer_norm_epsilon"
        ),
        names={"input_layernorm": "norm", "mamba": "mixer"},
    ),
    "Zamba2ForCausalLM": Architecture(
        model_type="zamba2",
        defaults={
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "intermediate_size": four_times_hidden,
            "num_key_value_heads": lambda fields: fields.integer("num_attention_heads"),
            "mamba_n_heads": 8,
            "mamba_d_state": 64,
        },
        hidden_acts={"gelu": "gelu_gated"},
        mlp_bias=True,
        block="shared",
        ropes=lambda fields, *sizes: (
            rope.one_rope if fields.flag("use_mem_rope", default=False) else rope.no_rope
        )(fields, *sizes),
        scales=lambda fields: Scales(attention=(fields.integer("head_dim") / 2) ** -0.5),
        recurrence=recurrent.zamba2_recurrence,
        sizes=recurrent.zamba2_sizes,
        shared=recurrent.zamba2_shared,
        aliases=spelled(
            "mamba_n_heads=n_mamba_heads mamba_n_groups=mamba_ngroups mamba_proj_bias=add_bias_linear "
            "mlp_bias=add_bias_linear"
        ),
        names={"model.norm.weight": "model.final_layernorm.weight"},
        # transformers shares no blocks either where the output head is not the embedding.
        refuse=refuse_options(tie_word_embeddings=True),
    ),
    "OlmoHybridForCausalLM": Architecture(
        model_type="olmo_hybrid",
        attention_bias=True,
        qk_norm="width",
        block="post_norm",
        recurrent_block="pre_norm",
        ropes=rope.rope_if_theta,
        recurrence=recurrent.olmo_recurrence,
        names=spelled(
            "in_proj_q=q_proj in_proj_k=k_proj in_proj_v=v_proj in_proj_z=g_proj in_proj_b=b_proj "
            "in_proj_a=a_proj out_proj=o_proj norm.weight=o_norm.weight"
        ),
    ),
    "KimiLinearForCausalLM": Architecture(
        model_type="kimi_linear",
        never_ties=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.446,
        },
        attention_bias=True,
        ropes=rope.no_rope,
        latent=deepseek_latent,
        sizes=deepseek_sizes,
        scales=deepseek_scales,
        recurrence=recurrent.kimi_recurrence,
        experts=moe.experts_with(moe.deepseek_v3_experts, module="block_sparse_moe", projections=W123),
        aliases=LING_NAMES,
        own_code="modeling_kimi.KimiLinearForCausalLM",
        refuse=refuse_options(mla_use_nope=True, moe_router_activation_func="sigmoid"),
    ),
    "BailingHybridForCausalLM": Architecture(
        model_type="bailing_hybrid",
        never_ties=True,
        defaults={
            "rope_theta": 6e6,
            "routed_scaling_factor": 2.5,
            "num_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "num_nextn_predict_layers": 1,
        },
        attention_bias=True,
        head_gate_flag="use_attention_gate",
        ropes=deepseek_rope,
        latent=deepseek_latent,
        sizes=recurrent.ling_sizes,
        scales=deepseek_scales,
        recurrence=recurrent.ling_recurrence,
        experts=moe.deepseek_v3_experts,
        aliases=LING_NAMES,
    ),
}
"""Hybrids by the class name in `architectures` of config.json."""
