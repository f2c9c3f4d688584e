"""Families with LayerNorms and MLPs without a gate: GPT-2, GPT-NeoX, Falcon, Phi and Starcoder2."""

from collections.abc import Callable, Mapping
from typing import Any

from llmbox.kernels.activation import Activation

from ..architecture import Architecture
from ..attention import one_window
from ..fields import MAX_WIDTH, Fields, show
from ..rope import no_rope, partial_rope

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


def ungated(fields: Fields) -> dict[str, Any]:
    return {"activation": GELUS.get(fields.text("hidden_act", "gelu"), "gelu")}


def gpt_neox_variant(fields: Fields) -> dict[str, Any]:
    """Return the activation, and a block with attention and MLP side by side or one after the other."""
    is_parallel = fields.flag("use_parallel_residual", default=True)
    by_group = not fields.flag(IN_ORDER, default=False)
    block = "parallel_norms" if is_parallel else "layer_norm"
    return {**ungated(fields), "block": block, "stacks_by_group": by_group}


def falcon_variant(fields: Fields) -> dict[str, Any]:
    """Return the block, and how projections are stacked: by KV head but in those of one KV head."""
    is_new = fields.flag("new_decoder_architecture", default=False)
    norms = fields.integer("num_ln_in_parallel_attn", 2 if is_new else 1)
    block = "parallel_norms" if is_new and norms == 2 else "parallel_biased"
    if not is_new and not fields.flag("parallel_attn", default=True):
        block = "layer_norm"
    by_group = is_new or not fields.flag("multi_query", default=True)
    by_group = by_group and not fields.flag(IN_ORDER, default=False)
    return {**ungated(fields), "block": block, "stacks_by_group": by_group}


def falcon_sizes(fields: Fields) -> dict[str, Any]:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    if fields.flag("new_decoder_architecture", default=False):
        kv_heads = fields.integer("num_kv_heads", heads)
    usual = fields.integer("intermediate_size", 4 * hidden)
    return {
        "num_key_value_heads": kv_heads,
        "intermediate_size": fields.integer("ffn_hidden_size", usual),
    }


def gpt2_sizes(fields: Fields) -> dict[str, Any]:
    usual = fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))
    return {"intermediate_size": fields.integer("n_inner", usual)}


def learned_positions(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", most=MAX_WIDTH)


def refuse_options(**usual: object) -> Callable[[Fields], None]:
    """Return a rule that refuses other values of these keys."""

    def refuse(fields: Fields) -> None:
        for key, value in usual.items():
            if fields.raw.get(key) not in (None, value):
                raise fields.error(f"{key} {show(fields.raw[key])} is not supported")

    return refuse


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
    hidden_acts=tuple(GELUS),
    attention_bias=True,
    mlp_bias=True,
    has_stacked_projections=True,
    block="parallel_biased",
    head_bias_flag="lm_head_bias",
    ropes=partial_rope,
    variant=ungated,
    aliases={"rms_norm_eps": "layer_norm_eps"},
    names={"o_proj": "dense", "up_proj": "fc1", "down_proj": "fc2", "norm": "final_layernorm"},
    own_code="modeling_phi.PhiForCausalLM",
    refuse=refuse_options(qk_layernorm=False),
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
    hidden_acts=tuple(GELUS),
    attention_bias=True,
    mlp_bias=True,
    has_stacked_projections=True,
    ropes=partial_rope,
    variant=gpt_neox_variant,
    aliases={
        "rms_norm_eps": "layer_norm_eps",
        "partial_rotary_factor": "rotary_pct",
        "rope_theta": "rotary_emb_base",
    },
)

GPT_FAMILIES: dict[str, Architecture] = {
    "FalconForCausalLM": Architecture(
        model_type="falcon",
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        hidden_acts=tuple(GELUS),
        attention_bias=True,
        mlp_bias=True,
        has_stacked_projections=True,
        variant=falcon_variant,
        sizes=falcon_sizes,
        aliases={
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "hidden_act": "activation",
            "rms_norm_eps": "layer_norm_epsilon",
            "attention_bias": "bias",
            "mlp_bias": "bias",
        },
        own_code="modeling_falcon.FalconForCausalLM",
        refuse=refuse_options(alibi=False),
    ),
    "GPT2LMHeadModel": Architecture(
        model_type="gpt2",
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        hidden_acts=tuple(GELUS),
        attention_bias=True,
        mlp_bias=True,
        block="layer_norm",
        has_stacked_projections=True,
        ropes=no_rope,
        variant=ungated,
        sizes=gpt2_sizes,
        position_rows=learned_positions,
        aliases={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        refuse=refuse_options(
            scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
        ),
    ),
    "GPTNeoXForCausalLM": _GPT_NEOX,
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
        hidden_acts=tuple(GELUS),
        attention_bias=True,
        mlp_bias=True,
        block="layer_norm",
        windows=one_window,
        variant=ungated,
        aliases={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
        names={"up_proj": "c_fc", "down_proj": "c_proj"},
    ),
}
"""These families by the class name in `architectures` of config.json."""
