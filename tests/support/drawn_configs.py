"""Draws of config.json: values that published checkpoints vary, for every family that transformers writes."""

import json
import random
from pathlib import Path
from typing import Any

from support.families import FAMILIES, LEFT_OUT, MIXED, MOE, SIBLINGS, fields_of, make_family, spell_as_before

ORIGINAL = 32
"""`original_max_position_embeddings`; prompts are longer."""
WRITTEN_BY_HAND: dict[str, dict[str, Any]] = {
    **{arch: {} for arch in ("llama", "granite", "olmo2", "gemma", "phi3", "smollm3")},
    "mistral": {"sliding_window": 19},
    "olmo3": {"sliding_window": 19},
    "mixtral": MIXED,
    "qwen2": {"head_dim": LEFT_OUT, "use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1},
    "qwen3_moe": MOE,
    "gemma2": {"sliding_window": 19},
    "gemma3_text": {"sliding_window": 19, "num_hidden_layers": 3},
}
"""Families of `tiny_models.py`, as transformers has them."""
DRAWN = sorted({**FAMILIES, **SIBLINGS, **WRITTEN_BY_HAND})

ACTS = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "gelu_fast", "quick_gelu"]
_VALUES: dict[str, list[Any]] = {
    "hidden_act hidden_activation activation_function activation mlp_hidden_act": ACTS,
    "mamba_hidden_act": ["silu", "gelu"],
    "num_attention_heads": [2, 4, 8],
    "num_key_value_heads": [1, 2, 4],
    "num_kv_heads": [1, 2, 4],
    "num_hidden_layers": [2, 3, 4],
    "head_dim": [8, 16, 24, 32],
    "vocab_size": [320, 347, 384],
    "max_position_embeddings": [64, 128, 256, 4096],
    "sliding_window": [7, 19, 64, 4096, None],
    "window_size": [7, 19, 64],
    "attention_chunk_size": [8, 20, 64],
    "max_window_layers": [0, 1, 2, 5],
    "sliding_window_pattern": [2, 3, 4],
    "global_attn_every_n_layers": [2, 3],
    "no_rope_layer_interval": [2, 3],
    "rms_norm_eps layer_norm_eps norm_eps norm_epsilon": [1e-6, 1e-5, 1e-2],
    "layer_norm_epsilon mixer_rms_eps": [1e-6, 1e-5, 1e-2],
    "attn_logit_softcapping final_logit_softcapping": [None, 5.0, 20.0],
    "num_experts_per_tok num_experts_per_token moe_k moe_topk": [1, 2, 3],
    "num_experts num_local_experts n_routed_experts moe_num_experts": [4, 8, 12],
    "n_shared_experts num_shared_experts moe_num_shared_experts": [0, 1, 2, 3],
    "n_group num_expert_group": [1, 2, 4],
    "topk_group": [1, 2],
    "topk_method": ["greedy", "group_limited_greedy"],
    "first_k_dense_replace": [0, 1, 2],
    "num_dense_layers": [0, 1, 2],
    "moe_intermediate_size": [32, 40],
    "shared_expert_intermediate_size": [32, 56],
    "shared_intermediate_size": [0, 32, 56],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [0], [1]],
    "moe_layer_interval": [1, 2],
    "moe_layer_start_index": [0, 1],
    "moe_latent_size": [None, 24],
    "expert_selection_fn": ["softmax", "sigmoid"],
    "q_lora_rank": [None, 16, 24],
    "kv_lora_rank": [16, 32],
    "qk_nope_head_dim": [8, 16],
    "qk_rope_head_dim": [8, 16],
    "v_head_dim": [8, 12, 16],
    "index_topk": [4, 12, 100],
    "conv_kernel mamba_d_conv linear_conv_kernel_dim conv_L_cache": [2, 3, 4],
    "short_conv_kernel_size": [2, 3, 4],
    "mamba_d_state state_size ssm_state_size": [8, 16, 24],
    "mamba_n_groups n_groups": [1, 2, 4],
    "mamba_expand": [1, 2],
    "linear_num_value_heads": [2, 4, 8],
    "linear_key_head_dim": [8, 12, 16],
    "time_step_rank": [3, 5],
    "time_step_limit": [[0.0, float("inf")], [0.01, 0.2]],
    "position_embedding_type": ["rope", "nope", None],
    "clip_qkv": [None, 0.5, 8.0],
    "rotary_dim": [4, 8, 16],
    "logit_scale": [0.0625, 0.3],
    "num_kv_shared_layers": [0, 1, 2],
    "global_head_dim": [16, 32],
    "num_global_key_value_heads": [None, 1, 2],
    "altup_active_idx": [0, 1],
    "altup_coef_clip": [None, 0.5],
    "bos_token_id": [0, 5],
    "eos_token_id": [2, [2, 7]],
    "attention_layers": [["global", "local"]],
    "dim_model_base": [32, 48],
    "query_pre_attn_scalar": [16, 64],
    "partial_rotary_factor": [0.25, 0.5, 1.0],
    "rope_theta": [10000.0, 500.0],
    "use_bidirectional_attention": [None, True, False],
    "num_ln_in_parallel_attn": [None, 1, 2],
    "moe_router_logit_softcapping": [0.0, 2.0],
    "route_norm": [True, False],
    "score_func": ["sigmoid", "softmax"],
    "scoring_func": ["sigmoid", "softmax"],
    "shared_expert_combination_strategy": ["average", "sum"],
    "rms_norm_type": ["rms", "layer"],
    "attn_layer_period": [2, 3],
    "attn_layer_offset": [0, 1],
    "expert_layer_period": [1, 2, 3],
    "expert_layer_offset": [0, 1],
    "layer_group_size": [2, 3],
    "hidden_size": [48, 64, 96],
    "intermediate_size": [80, 96, 128],
    "mamba_d_ssm": [None, 96, 192],
    "block_multiple_of": [16, 24],
    "block_auto_adjust_ff_dim": [True, False],
    "altup_num_inputs": [2, 4],
    "laurel_rank": [8, 24],
    "linear_num_key_heads": [1, 2, 4],
    "linear_value_head_dim": [8, 24],
    "full_attn_idxs": [None, [0], [1]],
    "floor_scale": [8, 16, 8192],
    "interleave_moe_layer_step": [1, 2],
    "word_embed_proj_dim": [64, 32],
}
VALUES = {key: values for keys, values in _VALUES.items() for key in keys.split()}
"""Values of a key. Other keys: a flag is turned over, a float gets another value near it."""
TRAINING = (
    "dropout", "pdrop", "initializer", "init", "jitter", "loss", "output_", "use_cache", "summary", "return_",
    "is_", "id", "layerdrop", "pretraining", "tokens", "chunk_size", "kernels", "mambapy", "scan",
    "cross_attention", "linear_a_log", "linear_dt", "time_step_m", "time_step_floor", "time_step_init",
    "time_step_scale", "rescale_prenorm", "logits_to_keep", "mtp", "nextn", "aux", "overlap", "_name", "type",
    "fp32", "per_layer_config", "length",
)  # fmt: skip
"""Parts of keys that transformers reads in training only, or not at all."""


def base_fields(arch: str) -> dict[str, Any]:
    return fields_of(arch, WRITTEN_BY_HAND.get(arch, {}))


def make_drawn(directory: Path, arch: str, changes: dict[str, Any], *, is_old: bool = False) -> Path:
    """Write a model with these changes. `is_old`: with the config.json of transformers 4."""
    make_family(directory, arch, **WRITTEN_BY_HAND.get(arch, {}) | changes)
    if is_old:
        spell_as_before(directory)
    return directory


def prompt_of(config: dict[str, Any], length: int = 70) -> list[int]:
    """Return token ids: at most the context where RoPE would change beyond it."""
    if "dynamic" in json.dumps([config.get("rope_parameters"), config.get("rope_scaling")]):
        length = min(length, config["max_position_embeddings"])
    return random.Random(0).choices(range(3, 300), k=length)


def complete_fields(arch: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return all keys as transformers fills them in."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[arch](**fields).to_dict()


def draw_changes(rng: random.Random, arch: str, most: int = 5) -> dict[str, Any]:
    """Return a few keys with other values than those of the family's own tiny model."""
    whole = complete_fields(arch, base_fields(arch))
    keys = [key for key, value in whole.items() if other_values(key, value)]
    changes = {
        key: rng.choice(other_values(key, whole[key]))
        for key in rng.sample(keys, min(len(keys), rng.randint(1, most)))
        if VALUES.get(key) is not ACTS or rng.random() < 0.3
    }
    deeper = "num_hidden_layers" in changes
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        if whole.get(key) and (deeper or rng.random() < 0.3):
            changes[key] = draw_layer_types(rng, key, {**whole, **changes})
    if "qk_rope_head_dim" in changes and "head_dim" in base_fields(arch):
        changes["head_dim"] = changes["qk_rope_head_dim"]
    rope = whole.get("rope_parameters")
    if isinstance(rope, dict) and rng.random() < 0.5:
        changes["rope_parameters"] = draw_ropes(rng, rope, {**whole, **changes})
    return changes


def draw_layer_types(rng: random.Random, key: str, whole: dict[str, Any]) -> list[str]:
    kinds = sorted(set(whole[key]))
    if key == "layer_types" and whole.get("sliding_window") and "conv" not in kinds:
        kinds = sorted({*kinds, "sliding_attention", "full_attention"})
    return [rng.choice(kinds) for _ in range(whole.get("num_hidden_layers", len(whole[key])))]


def other_values(key: str, value: Any) -> list[Any]:
    if key in VALUES:
        return [other for other in VALUES[key] if other != value]
    if any(part in key for part in TRAINING):
        return []
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 0.7, value * 1.3] if value else []
    return []


def draw_ropes(rng: random.Random, rope: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        return {kind: draw_ropes(rng, own, whole) for kind, own in rope.items() if isinstance(own, dict)}
    drawn = {"rope_theta": rng.choice([500.0, 1e4, 5e5])}
    if "partial_rotary_factor" in rope:
        drawn["partial_rotary_factor"] = rng.choice([0.25, 0.5, 1.0])
    dim = whole.get("qk_rope_head_dim") or whole.get("head_dim")
    dim = dim or whole["hidden_size"] // whole["num_attention_heads"]
    pairs = int(dim * drawn.get("partial_rotary_factor", 1.0)) // 2
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "yarn", "longrope", "llama3"])
    drawn["rope_type"] = kind
    if kind != "default":
        drawn["factor"] = rng.choice([2.0, 4.0, 8.0])
    if kind in {"yarn", "longrope", "llama3"}:
        drawn["original_max_position_embeddings"] = ORIGINAL
    if kind == "llama3":
        drawn |= {"low_freq_factor": rng.choice([1.0, 0.5]), "high_freq_factor": 4.0}
    if kind == "longrope":
        drawn |= {
            "short_factor": [round(rng.uniform(1, 2), 2) for _ in range(pairs)],
            "long_factor": [round(rng.uniform(1, 4), 2) for _ in range(pairs)],
        }
    if kind in {"yarn", "longrope"} and rng.random() < 0.3:
        drawn["attention_factor"] = rng.choice([0.8, 1.3])
    if kind == "yarn":
        options = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7}
        options["mscale_all_dim"] = 0.5
        drawn |= {key: value for key, value in options.items() if rng.random() < 0.3}
    return drawn
