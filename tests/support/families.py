"""Tiny random models of families whose checkpoints transformers writes: their configs, and one folder each.

`tiny_models.py` writes the others without transformers.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

LEFT_OUT: Any = object()
"""Value of a key of `COMMON` that a family does not know."""
COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = DEEPSEEK | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
SPARSE: dict[str, Any] = LATENT | {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 20}
COHERE2_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 64,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
SHARED: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "sliding_window": 19,
    "final_logit_softcapping": 20.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA4
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320,
        "tie_word_embeddings": True,
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 19,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320,
        "laurel_rank": 24,
        "altup_num_inputs": 3,
        "altup_active_idx": 1,
        "intermediate_size": [96, 128, 96, 96, 64, 96],
        "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.95, 0.0],
        "tie_word_embeddings": True,
    },
    "gemma4_unified_text": GEMMA4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": True},
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 32,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "moe_layers": [1, 2, 3],
        "attention_chunk_size": 20,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "attention_bias": True,
    },
    "phimoe": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.2,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 25,
    },
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | SHARED,
    "qwen3_5_moe_text": DELTA | SHARED,
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "position_embedding_type": "rope",
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 3.0,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 16,
        "tie_word_embeddings": True,
    },
    "lfm3": {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "full_attention", "conv", "sliding_attention", "full_attention"],
        "sliding_window": 19,
        "tie_word_embeddings": True,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_key_value_heads": 4,
        "head_dim": LEFT_OUT,
        "num_mem_blocks": 2,
        "adapter_rank": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "tie_word_embeddings": True,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "falcon_h1": MAMBA
    | {
        "num_hidden_layers": 4,
        "mamba_d_ssm": 96,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "projectors_bias": True,
        "ssm_multipliers": [0.7, 0.5, 0.8, 1.2, 0.6],
        "mlp_multipliers": [0.8, 0.4],
        "embedding_multiplier": 5.0,
        "lm_head_multiplier": 0.3,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.7,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.3,
    },
    "nemotron_h": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "routed_scaling_factor": 1.5,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 24,
    },
    "mamba2": {
        "num_hidden_layers": 3,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 24,
        "use_bias": True,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 24,
        "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "glm": {},
    "glm4": {},
    "ministral3": {
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    },
    "seed_oss": {},
    "apertus": {"hidden_act": "xielu"},
    "ernie4_5": {"tie_word_embeddings": True, "use_bias": True},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
    },
    "exaone4": {"sliding_window": 19, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "gpt_oss": MIXED | {"sliding_window": 19, "rope_parameters": YARN | {"truncate": False}},
    "qwen2_moe": MOE | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 48},
    "olmoe": MOE | {"num_key_value_heads": 4},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"sliding_window": 19, "num_hidden_layers": 3, "layer_types": COHERE2_LAYERS},
    "deepseek_v3": LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "deepseek_v2": LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v32": SPARSE | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "glm_moe_dsa": SPARSE | {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    "glm4_moe_lite": LATENT | {"attention_bias": True},
    "glm4_moe": DEEPSEEK | {"use_qk_norm": True, "attention_bias": True},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
    },
    "granitemoe": MIXED | {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0},
    "minimax_m2": MIXED | {"head_dim": 32, "rotary_dim": 16},
    "mimo_v2_flash": {
        **{
            key: value
            for key, value in DEEPSEEK.items()
            if key not in {"n_shared_experts", "first_k_dense_replace"}
        },
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "head_dim": 24,
        "v_head_dim": 16,
        "sliding_window": 19,
    },
}
"""Fields of config.json beside `COMMON`, by `model_type`."""
SLIDING_LAST = ["full_attention", "sliding_attention"]
SIBLINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"sliding_window": 19, "num_hidden_layers": 3, "layer_types": COHERE2_LAYERS}
    | {"logit_scale": 0.5, "tie_word_embeddings": True}
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 5000.0, "rope_type": "default"},
            "full_attention": None,
        }
    },
    "afmoe": MOE
    | {
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "route_scale": 1.5,
        "global_attn_every_n_layers": 2,
        "sliding_window": 19,
        "mup_enabled": True,
    },
    "arcee": {"mlp_bias": True, "attention_bias": True},
    "axk1": LATENT | {"num_hidden_layers": 3},
    "cohere2_moe": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "sliding_window_pattern": 3,
        "sliding_window": 19,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "intermediate_size": 48,
        "prefix_dense_intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "flint": MOE
    | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "mlp_only_layers": [0],
        "sliding_window": 19,
        "shared_expert_intermediate_size": 48,
    },
    "kolibri1": MOE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 19,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "intermediate_size": LEFT_OUT,
    },
    "laguna": MOE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [4, 6, 2],
        "sliding_window": 19,
        "shared_expert_intermediate_size": 48,
        "moe_routed_scaling_factor": 1.5,
    },
    "bailing_hybrid": {
        **{key: value for key, value in LATENT.items() if key not in {"n_routed_experts", "q_lora_rank"}},
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "num_local_experts": 8,
        "head_dim": 16,
    },
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 32, "mlp_bias": False},
    "biogpt": {"num_key_value_heads": None, "head_dim": LEFT_OUT, "tie_word_embeddings": True},
    "bitnet": {"attention_bias": True},
    "cwm": {"sliding_window": 19, "tie_word_embeddings": True},
    "dots1": DEEPSEEK | {"max_window_layers": 1, "sliding_window": 19},
    "exaone_moe": MOE | {"sliding_window": 19, "num_hidden_layers": 3, "sliding_window_pattern": 3},
    "granitemoeshared": MIXED | {"shared_intermediate_size": 48, "residual_multiplier": 0.3},
    "granite_swa": {
        "num_hidden_layers": 3,
        "layer_rope_theta": [0, 10000.0, 5000.0],
        "sliding_window": 19,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
    },
    "granitemoe_swa": MIXED | {"shared_intermediate_size": 48, "sliding_window": 19},
    "flex_olmo": MIXED | {"num_experts": 4, "num_local_experts": LEFT_OUT},
    "helium": {"attention_bias": True},
    "hyperclovax": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
    "jais2": {"tie_word_embeddings": True},
    "mellum": MOE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 19,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    },
    "falcon_mamba": {"intermediate_size": 128, "mixer_rms_eps": 1e-3, "time_step_rank": 5},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2]},
    "hy_v3": MOE | {"num_shared_experts": 2, "num_hidden_layers": 3},
    "mamba": {"intermediate_size": 128, "use_bias": True, "tie_word_embeddings": True},
    "ministral": {"sliding_window": 19, "layer_types": SLIDING_LAST},
    "minicpm3": {
        **{key: value for key, value in LATENT.items() if key not in DEEPSEEK},
        "scale_emb": 6,
        "dim_model_base": 48,
        "tie_word_embeddings": True,
    },
    "mistral4": LATENT
    | {
        "head_dim": LEFT_OUT,
        "num_experts_per_tok": 2,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    },
    "nanochat": {"attention_bias": True},
    "olmo": {"attention_bias": True, "head_dim": LEFT_OUT},
    "nemotron": {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu2"},
    "solar_open": {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
    "stablelm": {"use_qkv_bias": True, "head_dim": None},
    "vaultgemma": {"sliding_window": 19, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "falcon": {
        "head_dim": LEFT_OUT,
        "num_kv_heads": 4,
        "multi_query": True,
        "ffn_hidden_size": 96,
        "tie_word_embeddings": True,
    },
    "gpt2": {"n_inner": 96, "num_key_value_heads": None, "tie_word_embeddings": True},
    "gpt_bigcode": {"num_key_value_heads": None, "n_inner": 96, "tie_word_embeddings": True},
    "gpt_neo": {
        "num_key_value_heads": None,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 19,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "gptj": {"num_key_value_heads": None, "head_dim": LEFT_OUT, "n_inner": 96, "rotary_dim": 8},
    "opt": {"num_key_value_heads": None, "head_dim": LEFT_OUT, "ffn_dim": 96, "tie_word_embeddings": True},
    "phi": {},
    "starcoder2": {"sliding_window": 19, "head_dim": None, "tie_word_embeddings": True},
    "youtu": {key: value for key, value in LATENT.items() if key not in DEEPSEEK},
    "step3p5": {
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "num_sliding_attention_heads": 6,
        "sliding_window": 19,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "share_expert_dim": 48,
        "moe_layers_enum": "1,2,3",
        "moe_router_scaling_factor": 1.5,
        "rope_theta": [50000.0, 10000.0] * 2,
        "partial_rotary_factors": [0.5, 1.0] * 2,
        "rope_scaling": LLAMA3,
        "swiglu_limits": [None, 0.0, 0.5, 0.7],
        "swiglu_limits_shared": [0.6, 0.0, None, 0.4],
    },
}
"""The same for families that have the layers of those above."""


STEP_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "mlp_ratio": 2.0,
}


def fields_of(arch: str, overrides: dict[str, Any]) -> dict[str, Any]:
    fields = COMMON | (FAMILIES | SIBLINGS).get(arch, {}) | overrides
    return {key: value for key, value in fields.items() if value is not LEFT_OUT}


def causal_model(arch: str) -> Any:
    """Return the class of transformers for a `model_type`, also one that its `auto` classes lack."""
    import transformers

    others = {"mistral4": "Mistral4ForCausalLM", "step3p7": "Step3p7ForConditionalGeneration"}
    return getattr(transformers, others.get(arch, "AutoModelForCausalLM"))


def make_family(directory: Path, arch: str, *, shards: int = 1, seed: int = 0, **overrides: Any) -> Path:
    """Write a model of a family as transformers publishes it. `shards`: at least so many files."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    fields = fields_of(arch, overrides)
    if arch == "step3p5":  # transformers has no class for it without a tower
        arch, fields = "step3p7", {"text_config": fields, "vision_config": STEP_VISION}
    config = AutoConfig.for_model(arch, **fields)
    config.dtype = "float32"
    kind = causal_model(arch)
    model = kind.from_config(config, dtype=torch.float32) if hasattr(kind, "from_config") else kind(config)
    randomize(model, seed)
    size = sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))
    model.save_pretrained(directory, max_shard_size=size // shards + 1)
    if arch in {"kimi_linear", "olmo_hybrid"}:
        publish(directory)
    return directory


def publish(directory: Path) -> None:
    """Rewrite tensors that transformers writes otherwise than published checkpoints have them: it cuts the
    convolutions of (q, k, v) into equal parts, and takes Kimi's MLPs for experts.
    """
    from safetensors.torch import load_file, save_file

    files = {file: load_file(file) for file in directory.glob("*.safetensors")}
    whole = {name: tensor for weights in files.values() for name, tensor in weights.items()}
    for first in [name for name in whole if name.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        rows = [len(whole[first.replace("q_conv1d", f"{part}_proj")]) for part in "qkv"]
        conv = torch.cat([whole[name] for name in names])
        whole |= {n: part.contiguous() for n, part in zip(names, conv.split(rows), strict=True)}
    for file, weights in files.items():
        save_file({published_name(name): whole[name] for name in weights}, file)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        raw = json.loads(index.read_text())
        raw["weight_map"] = {published_name(name): file for name, file in raw["weight_map"].items()}
        index.write_text(json.dumps(raw))


def published_name(name: str) -> str:
    return re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)


def make_mistral_that_sees(directory: Path, arch: str) -> Path:
    """Write a Mistral 3 with its vision tower, whose `text_config` is of `arch`."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8}
    text = fields_of(arch, {"model_type": arch})
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = Mistral3ForConditionalGeneration(config)
    randomize(model, 0)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw weights wide enough that greedy tokens vary; those of norms stay near their defaults."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if not weight.is_floating_point():
            continue
        if "norm" in name or "scal" in name or ".ln_" in name:
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            if "gemma" in model.config.model_type and "q_norm" in name:
                weight.mul_(0.5)  # scores have no other scale, and steep softmaxes make rounding visible
        elif "inv_freq" not in name and weight.dim():
            scale = 1.0 if "embed" in name else 1.5 / math.sqrt(weight.shape[-1])
            if model.config.model_type == "zamba2" and re.search(r"adapter|[qk]_proj|embed|\.linear\.", name):
                scale *= 0.4  # the same
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))


def spell_as_before(directory: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it: `rope_theta`, `rope_scaling` and `torch_dtype`."""
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    raw["torch_dtype"] = raw.pop("dtype")
    if "text_config" in raw:
        spell_step_as_published(raw["text_config"])
        file.write_text(json.dumps(raw))
        return
    if "per_layer_config" in raw:  # Gemma 4
        full = next(iter(raw.pop("per_layer_config").values()))
        raw["global_head_dim"] = full["head_dim"]
        raw["num_global_key_value_heads"] = full.get("num_key_value_heads")
        file.write_text(json.dumps(raw))
        return
    rope = raw.pop("rope_parameters", None)
    if raw["model_type"] in {"lfm3", "mellum"}:  # newer than that spelling
        raw["rope_parameters"] = rope
    elif rope is not None:
        spell_rope_as_before(raw, rope)
    if raw["model_type"] == "zamba2":
        kinds = raw["layers_block_type"]
        raw["layers_block_type"] = [kind.replace("linear_attention", "mamba") for kind in kinds]
    elif "layers_block_type" in raw:
        letters = {"linear_attention": "M", "full_attention": "*", "moe": "E", "mlp": "-"}
        raw["hybrid_override_pattern"] = "".join(letters[kind] for kind in raw.pop("layers_block_type"))
    if "linear_head_dim" in raw:
        kinds = list(enumerate(raw.pop("layer_types"), 1))
        raw["linear_attn_config"] = {
            "head_dim": raw.pop("linear_head_dim"),
            "num_heads": raw.pop("linear_num_heads"),
            "short_conv_kernel_size": raw.pop("linear_conv_kernel_dim"),
            "full_attn_layers": [number for number, kind in kinds if kind == "full_attention"],
            "kda_layers": [number for number, kind in kinds if kind == "linear_attention"],
        }
        raw["first_k_dense_replace"] = raw.pop("mlp_layer_types").count("dense")
    file.write_text(json.dumps(raw))


def spell_step_as_published(raw: dict[str, Any]) -> None:
    """Write lists with an entry for each layer, and for one of multi-token prediction after the last."""
    del raw["per_layer_config"], raw["query_pre_attn_scalar"]
    types, ropes, mlps = raw["layer_types"], raw.pop("rope_parameters"), raw.pop("mlp_layer_types")
    heads = raw.pop("num_sliding_attention_heads")
    raw["attention_other_setting"] = {"num_attention_heads": heads, "head_dim": raw["head_dim"]}
    listed = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}
    raw |= {key: [ropes[kind][name] for kind in types] for name, key in listed.items()}
    raw |= {"rope_scaling": {key: ropes["full_attention"][key] for key in LLAMA3}}
    names = {"n_routed_experts": "moe_num_experts", "num_experts_per_tok": "moe_top_k"}
    for usual, name in (names | {"num_key_value_heads": "num_attention_groups"}).items():
        raw[name] = raw.pop(usual)
    raw["moe_layers_enum"] = ",".join(str(layer) for layer, kind in enumerate(mlps) if kind == "sparse")
    raw["yarn_only_types"] = ["full_attention"]
    for key in ("layer_types", *listed.values(), "swiglu_limits", "swiglu_limits_shared"):
        raw[key].append(raw[key][-1])


def spell_rope_as_before(raw: dict[str, Any], rope: dict[str, Any]) -> None:
    if rope.get("full_attention", rope) is None:  # Cohere Compass, published with keys beside the types
        raw["rope_parameters"] = rope | {"rope_theta": 1e4, "rope_type": "default"}
        return
    if "sliding_attention" in rope:  # Gemma 3n
        raw["rope_theta"] = rope["full_attention"]["rope_theta"]
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        return
    raw["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type", "default")
    raw["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}


def make_qwen_that_sees(directory: Path) -> Path:
    """Write a Qwen3.5 with its vision tower and a layer that drafts tokens, as they are published."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "patch_size": 4}
    text = COMMON | DELTA
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )
    randomize(model, 0)
    model.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    weights["mtp.layers.0.input_layernorm.weight"] = torch.ones(64)
    save_file(weights, directory / "model.safetensors")
    return directory


def stack_experts(directory: Path) -> None:
    """Rewrite a checkpoint so that gates and ups, and downs, of a layer's experts are one tensor each."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    weights = load_file(file)
    for module in sorted({name.split(".experts.")[0] for name in weights if ".experts." in name}):
        count = sum(name.startswith(f"{module}.experts.") for name in weights) // 3
        gates, ups, downs = (
            [weights.pop(f"{module}.experts.{number}.{part}_proj.weight") for number in range(count)]
            for part in ("gate", "up", "down")
        )
        pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        weights[f"{module}.experts.gate_up_proj"] = torch.stack(pairs)
        weights[f"{module}.experts.down_proj"] = torch.stack(downs)
    save_file(weights, file)
