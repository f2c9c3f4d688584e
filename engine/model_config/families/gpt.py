"""Families whose LayerNorms have biases, GPT-2, GPT-Neo, GPT-J, GPT-NeoX, GPTBigCode, OPT, BioGPT, Falcon,
Phi, Starcoder2, Nemotron, Jais 2 and StableLM, and whose norms have no weights, NanoChat and OLMo 1.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmbox.kernels.activation import Activation

from ..architecture import RELU2, Architecture, four_times_hidden, no_rows, nothing, refuse_options, spelled
from ..attention import FULL, SLIDING, Scales, Windows, one_window, root_of_width_if, windows_by_type
from ..fields import MAX_WIDTH, Fields
from ..rope import interleaved_rope, no_rope, one_rope, partial_rope, reversed_rope
from .gemma import logits_cap

GELUS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu",
}
"""Activations of MLPs without a gate, by their names in config.json."""
IN_ORDER = "qkv_in_order"
"""Key of a GGUF file's config.json: all queries come before the keys and values."""


def gpt_neox_variant(fields: Fields) -> dict[str, Any]:
    """Return the activation, and a block with attention and MLP side by side or one after the other."""
    is_parallel = fields.flag("use_parallel_residual", default=True)
    by_group = not fields.flag(IN_ORDER, default=False)
    block = "parallel_norms" if is_parallel else "layer_norm"
    return {"block": block, "stacks_by_group": by_group}


def falcon_variant(fields: Fields) -> dict[str, Any]:
    """Return the block, and how projections are stacked: by KV head but in those of one KV head."""
    is_new = fields.flag("new_decoder_architecture", default=False)
    norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    block = "parallel_norms" if is_new and norms == 2 else "parallel_biased"
    if not is_new and not fields.flag("parallel_attn", default=True):
        block = "layer_norm"
    by_group = is_new or not fields.flag("multi_query", default=True)
    by_group = by_group and not fields.flag(IN_ORDER, default=False)
    return {"block": block, "stacks_by_group": by_group}


def falcon_sizes(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads")
    kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    if fields.flag("new_decoder_architecture", default=False):
        kv_heads = fields.integer("num_kv_heads", heads)
    return {"num_key_value_heads": kv_heads}


def gpt_bigcode_variant(fields: Fields) -> dict[str, Any]:
    by_group = not fields.flag("multi_query", default=True) and not fields.flag(IN_ORDER, default=False)
    return {"stacks_by_group": by_group}


def gpt_bigcode_sizes(fields: Fields) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads")
    kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    return {"num_key_value_heads": kv_heads}


def gpt_neo_windows(fields: Fields, layers: int) -> Windows:
    """Return windows of the layers that `attention_layers`, or else `attention_types`, calls local."""
    kinds = fields.raw.get("attention_layers")
    if kinds is None:
        groups = fields.raw.get("attention_types") or [[["global", "local"], (layers + 1) // 2]]
        try:
            kinds = [kind for names, times in groups for kind in list(names) * times][:layers]
        except (TypeError, ValueError):
            raise fields.error("attention_types must be a list of [names, times]") from None
    if not isinstance(kinds, list):
        raise fields.error("attention_layers must be a list of names")
    types = [{"global": FULL, "local": SLIDING}.get(str(kind), str(kind)) for kind in kinds]
    return windows_by_type(fields.replace(layer_types=types), layers)


def gptj_sizes(fields: Fields) -> dict[str, Any]:
    head_dim = fields.integer("hidden_size") // fields.integer("num_attention_heads") or 1
    return {"partial_rotary_factor": fields.integer("rotary_dim", 64) / head_dim}


def learned_positions(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", most=MAX_WIDTH)


def opt_positions(fields: Fields) -> int:
    """Return the rows of OPT's table, of which the first two stand for padding."""
    return learned_positions(fields) + 2


def stablelm_variant(fields: Fields) -> dict[str, Any]:
    is_parallel = fields.flag("use_parallel_residual", default=False)
    is_stacked = fields.flag("qk_layernorm_stacked", default=False)
    return {
        "block": "parallel_biased" if is_parallel else "layer_norm",
        "qk_norm": "layer" if is_stacked else "layer_by_head",
    }


def refuse_other_opt(fields: Fields) -> None:
    width = fields.integer("hidden_size")
    usual = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "word_embed_proj_dim": width}
    refuse_options(**usual, layer_norm_elementwise_affine=True)(fields)


_PHI = Architecture(
    model_type="phi",
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
        "lm_head_bias": True,
    },
    hidden_acts=GELUS,
    attention_bias=True,
    mlp_bias=True,
    has_stacked_projections=True,
    block="parallel_biased",
    head_bias_flag="lm_head_bias",
    ropes=partial_rope,
    aliases={"rms_norm_eps": "layer_norm_eps"},
    names={"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "norm": "final_layernorm"},
    own_code="modeling_phi.PhiForCausalLM",
    refuse=refuse_options(qk_layernorm=False),
)
_GPT2 = Architecture(
    model_type="gpt2",
    defaults={
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 1024,
        "intermediate_size": four_times_hidden,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    hidden_acts=GELUS,
    attention_bias=True,
    mlp_bias=True,
    block="layer_norm",
    has_stacked_projections=True,
    ropes=no_rope,
    position_rows=learned_positions,
    aliases=spelled(
        "hidden_size=n_embd intermediate_size=n_inner num_attention_heads=n_head num_hidden_layers=n_layer "
        "max_position_embeddings=n_positions hidden_act=activation_function rms_norm_eps=layer_norm_epsilon"
    ),
    refuse=refuse_options(
        scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    ),
)
_GPT_NEOX = Architecture(
    model_type="gpt_neox",
    defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "max_position_embeddings": 2048,
        "attention_bias": True,
        "mlp_bias": True,
    },
    hidden_acts=GELUS,
    attention_bias=True,
    mlp_bias=True,
    has_stacked_projections=True,
    ropes=partial_rope,
    variant=gpt_neox_variant,
    aliases=spelled(
        "rms_norm_eps=layer_norm_eps partial_rotary_factor=rotary_pct rope_theta=rotary_emb_base"
    ),
)
_NEMOTRON = Architecture(
    model_type="nemotron",
    defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    hidden_acts=RELU2,
    norms_add_one=True,
    fits_float16=False,
    attention_bias=True,
    mlp_bias=True,
    block="layer_norm",
    ropes=partial_rope,
    aliases={"rms_norm_eps": "norm_eps"},
)

GPT_FAMILIES: dict[str, Architecture] = {
    "BitNetForCausalLM": Architecture(
        model_type="bitnet",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 2048},
        hidden_acts={"relu2": "relu2_gated"},
        fits_float16=False,
        attention_bias=True,
        has_sub_norms=True,
        own_code="modeling_bitnet.BitNetForCausalLM",
    ),
    "BioGptForCausalLM": replace(
        _GPT2,
        model_type="biogpt",
        defaults={**_GPT2.defaults, "hidden_act": "gelu"},
        has_stacked_projections=False,
        position_rows=opt_positions,
        scales=lambda fields: Scales(embedding=root_of_width_if(fields, "scale_embedding", default=True)),
        aliases={},
        refuse=nothing,
    ),
    "NanoChatForCausalLM": Architecture(
        model_type="nanochat",
        defaults={"max_position_embeddings": 2048, "final_logit_softcapping": 15.0},
        hidden_acts=RELU2,
        fits_float16=False,
        attention_bias=True,
        qk_norm="no_weight",
        norms_after_rope=True,
        has_norm_weights=False,
        norms_embedding=True,
        ropes=reversed_rope,
        scales=lambda fields: Scales(logits_cap=logits_cap(fields)),
        names={"up_proj": "fc1", "down_proj": "fc2"},
    ),
    "OlmoForCausalLM": Architecture(
        model_type="olmo",
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        attention_bias=True,
        has_norm_weights=False,
        block="layer_norm",
        refuse=refuse_options(clip_qkv=None),
    ),
    "FalconForCausalLM": Architecture(
        model_type="falcon",
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "intermediate_size": four_times_hidden,
            "tie_word_embeddings": True,
        },
        hidden_acts=GELUS,
        attention_bias=True,
        mlp_bias=True,
        has_stacked_projections=True,
        variant=falcon_variant,
        sizes=falcon_sizes,
        aliases=spelled(
            "intermediate_size=ffn_hidden_size num_attention_heads=n_head num_hidden_layers=n_layer "
            "hidden_act=activation rms_norm_eps=layer_norm_epsilon attention_bias=bias mlp_bias=bias"
        ),
        own_code="modeling_falcon.FalconForCausalLM",
        refuse=refuse_options(alibi=False),
    ),
    "GPT2LMHeadModel": _GPT2,
    "GPTBigCodeForCausalLM": replace(
        _GPT2,
        model_type="gpt_bigcode",
        defaults={**_GPT2.defaults, "hidden_act": "gelu_pytorch_tanh"},
        variant=gpt_bigcode_variant,
        sizes=gpt_bigcode_sizes,
    ),
    "GPTJForCausalLM": replace(
        _GPT2,
        model_type="gptj",
        defaults={
            **_GPT2.defaults,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "lm_head_bias": True,
        },
        block="parallel_biased",
        has_stacked_projections=False,
        head_bias_flag="lm_head_bias",
        ropes=interleaved_rope,
        sizes=gptj_sizes,
        position_rows=no_rows,
    ),
    "GPTNeoForCausalLM": replace(
        _GPT2,
        model_type="gpt_neo",
        defaults={
            **_GPT2.defaults,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "attention_out_bias": True,
            "sliding_window": 256,
        },
        has_stacked_projections=False,
        windows=gpt_neo_windows,
        scales=lambda _fields: Scales(attention=1.0),
        aliases=spelled(
            "num_attention_heads=num_heads num_hidden_layers=num_layers hidden_act=activation_function "
            "rms_norm_eps=layer_norm_epsilon sliding_window=window_size"
        ),
        refuse=nothing,
    ),
    "GPTNeoXForCausalLM": _GPT_NEOX,
    "Jais2ForCausalLM": replace(
        _NEMOTRON,
        model_type="jais2",
        defaults={"layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        norms_add_one=False,
        ropes=one_rope,
        aliases={"rms_norm_eps": "layer_norm_eps"},
    ),
    "OPTForCausalLM": replace(
        _GPT2,
        model_type="opt",
        defaults={**_GPT2.defaults, "hidden_act": "relu", "max_position_embeddings": 2048},
        has_stacked_projections=False,
        position_rows=opt_positions,
        aliases=spelled(
            "intermediate_size=ffn_dim hidden_act=activation_function attention_bias=enable_bias "
            "mlp_bias=enable_bias"
        ),
        refuse=refuse_other_opt,
    ),
    "PhiForCausalLM": _PHI,
    "Starcoder2ForCausalLM": Architecture(
        model_type="starcoder2",
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        hidden_acts=GELUS,
        attention_bias=True,
        mlp_bias=True,
        block="layer_norm",
        windows=one_window,
        aliases={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
        names={"up_proj": "c_fc", "down_proj": "c_proj"},
    ),
    "NemotronForCausalLM": _NEMOTRON,
    "StableLmForCausalLM": Architecture(
        model_type="stablelm",
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_out_bias": False},
        attention_bias=True,
        qk_norm_flag="qk_layernorm",
        ropes=partial_rope,
        variant=stablelm_variant,
        aliases={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
        names={"q_norm": "q_layernorm.norms", "k_norm": "k_layernorm.norms"},
    ),
}
"""These families by the class name in `architectures` of config.json."""
