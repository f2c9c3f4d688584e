"""Keys of config.json that GGUF files of one family say in another way, or leave out. Torch-free.

Sources: conversion/ of llama.cpp, which writes the files, and its src/models, which says what they leave out.
"""

from typing import Any, Final

from ..errors import ModelError
from .names import SCORES
from .reader import GgufFile

Config = dict[str, Any]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_MULTIPLIER: Final = "rope.scaling.yarn_log_multiplier"
_TEMPERATURE: Final = "attention.temperature_scale"
_SIGMOID: Final = 2
"""Number of sigmoids in `expert_gating_func`."""


def nothing_more(_gguf: GgufFile, _config: Config) -> Config:
    return {}


def sliding_types(gguf: GgufFile, layers: int) -> list[str]:
    """Return the attention of each layer by `attention.sliding_window_pattern`, a truth for each. Raises
    ModelError.
    """
    pattern = gguf.value("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) < layers:
        raise ModelError(
            f"{gguf.path}: GGUF does not say which layers of {gguf.architecture} have a sliding window"
        )
    return [SLIDING if slides else FULL for slides in pattern[:layers]]


def _window(gguf: GgufFile) -> Config:
    window = gguf.value("attention.sliding_window")
    if not window:
        return {"sliding_window": None}
    if gguf.architecture != "llama":
        raise ModelError(
            f"{gguf.path}: GGUF does not say which layers of {gguf.architecture} have a sliding window"
        )
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


def llama_fields(gguf: GgufFile, _config: Config) -> Config:
    found = _window(gguf)
    if gguf.value("expert_count"):
        count, per_token = selected_experts(gguf)
        found |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": count}
        found |= {"num_experts_per_tok": per_token}
    return found


def window_fields(gguf: GgufFile, _config: Config) -> Config:
    return _window(gguf)


def selected_experts(gguf: GgufFile) -> tuple[int, int]:
    """Return the number of experts, and of those for a token. Raises ModelError."""
    if not any(name.endswith(".ffn_down_exps.weight") for name in gguf.tensors):
        raise ModelError(
            f"{gguf.path}: it has a tensor for each expert, like files before 2024; use a newer one"
        )
    return gguf.integer("expert_count"), gguf.integer("expert_used_count")


def multipliers(gguf: GgufFile, config: Config) -> Config:
    """Return the multipliers of a Granite, or a MiniCPM, whose files do not have that of attention."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    attention = {"attention_multiplier": gguf.number("attention.scale", config["head_dim"] ** -0.5)}
    return attention | {name: gguf.number(key, 1.0) for name, key in names.items()}


def granite_fields(gguf: GgufFile, config: Config) -> Config:
    found = multipliers(gguf, config) | _window(gguf)
    if gguf.value("expert_count"):
        count, per_token = selected_experts(gguf)
        found |= {"num_local_experts": count, "num_experts_per_tok": per_token}
        if shared := gguf.value("expert_shared_feed_forward_length"):
            found |= {"architectures": ["GraniteMoeSharedForCausalLM"]}
            found |= {"shared_intermediate_size": shared}
    return found


def routed_experts(gguf: GgufFile, config: Config) -> Config:
    """Return the experts of DeepSeek's kind: after dense layers, beside shared ones, in groups."""
    count, per_token = selected_experts(gguf)
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": gguf.integer("expert_feed_forward_length"),
        "intermediate_size": config["intermediate_size"] or gguf.integer("expert_feed_forward_length"),
        "n_shared_experts": gguf.count("expert_shared_count"),
        "first_k_dense_replace": gguf.count("leading_dense_block_count"),
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(gguf.value("expert_weights_norm", False)),
        "n_group": gguf.integer("expert_group_count", 1),
        "topk_group": gguf.integer("expert_group_used_count", 1),
        "num_nextn_predict_layers": 0,
    }


def sigmoid_routed_fields(gguf: GgufFile, config: Config) -> Config:
    if gguf.value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ModelError(
            f"{gguf.path}: {gguf.architecture} with a router other than sigmoid is not supported"
        )
    norms = "blk.0.attn_q_norm.weight" in gguf.tensors
    behind = f"blk.{config['num_hidden_layers']}."
    has_mtp = all(f"{behind}{part}.weight" in gguf.tensors for part in ("nextn.eh_proj", "ffn_down_exps"))
    return routed_experts(gguf, config) | {
        "use_qk_norm": norms,
        "attention_out_bias": False,
        "num_nextn_predict_layers": int(has_mtp),
    }


def latent_fields(gguf: GgufFile, config: Config) -> Config:
    """Return the sizes of latent attention."""
    turned, rank = gguf.integer("rope.dimension_count"), gguf.integer("attention.kv_lora_rank")
    head = gguf.integer("attention.key_length_mla", gguf.integer("attention.key_length"))
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": gguf.value("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": head - turned,
        "v_head_dim": gguf.integer("attention.value_length_mla", gguf.integer("attention.value_length")),
        "head_dim": turned,
    }


def mistral4_fields(gguf: GgufFile, config: Config) -> Config:
    """Add to DeepSeek's sizes that queries grow with their position. Files of Mistral 4 do not say by how
    much: as in the published model.
    """
    config["rope_parameters"]["llama_4_scaling_beta"] = gguf.number(_TEMPERATURE, 0.1)
    _add_multiplier(gguf, config)
    return latent_fields(gguf, config) | routed_experts(gguf, config)


def _add_multiplier(gguf: GgufFile, config: Config) -> None:
    """Add what YaRN multiplies scores of latent attention by, of which files have a tenth."""
    rope = config["rope_parameters"]
    if (multiplier := gguf.number(_MULTIPLIER, 0.0)) and rope["rope_type"] == "yarn":
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{10 * multiplier:.6g}"))


def deepseek2_fields(gguf: GgufFile, config: Config) -> Config:
    """Read a DeepSeek, or what llama.cpp calls so. Mistral Large 3, whose queries grow, is computed as a
    Mistral 4.
    """
    if gguf.value(_TEMPERATURE):
        return mistral4_fields(gguf, config) | {"architectures": ["Mistral4ForCausalLM"]}
    found = latent_fields(gguf, config)
    _add_multiplier(gguf, config)
    if not gguf.value("expert_count"):
        return found | {"architectures": ["YoutuForCausalLM"]}
    found |= routed_experts(gguf, config)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in gguf.tensors)
    if corrected or gguf.value("expert_gating_func", 1) == _SIGMOID:
        return found
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "topk_method": method,
    }


def qwen_experts(gguf: GgufFile, config: Config, *, normalized: bool) -> Config:
    count, per_token = selected_experts(gguf)
    inner = gguf.integer("expert_feed_forward_length", config["intermediate_size"])
    found = {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": inner,
        "intermediate_size": config["intermediate_size"] or inner,
        "norm_topk_prob": normalized,
    }
    if shared := gguf.value("expert_shared_feed_forward_length"):
        found["shared_expert_intermediate_size"] = shared
    return found


def qwen3_moe_fields(gguf: GgufFile, config: Config) -> Config:
    return _window(gguf) | qwen_experts(gguf, config, normalized=True)


def qwen2_moe_fields(gguf: GgufFile, config: Config) -> Config:
    biases = {"qkv_bias": config["attention_bias"]}
    return biases | _window(gguf) | qwen_experts(gguf, config, normalized=False)


def olmoe_fields(gguf: GgufFile, config: Config) -> Config:
    found = qwen_experts(gguf, config, normalized=False)
    return found | {"intermediate_size": found["moe_intermediate_size"]}


def gpt_oss_fields(gguf: GgufFile, config: Config) -> Config:
    count, per_token = selected_experts(gguf)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    return {
        "sliding_window": gguf.integer("attention.sliding_window"),
        "num_local_experts": count,
        "num_experts_per_tok": per_token,
        "intermediate_size": gguf.integer("expert_feed_forward_length"),
    }


def phi3_fields(gguf: GgufFile, config: Config) -> Config:
    window = gguf.value("attention.sliding_window") or None
    original = gguf.value("rope.scaling.original_context_length", config["max_position_embeddings"])
    return {"sliding_window": window, "original_max_position_embeddings": original}


def ernie_fields(gguf: GgufFile, config: Config) -> Config:
    biases = {"use_bias": config["attention_bias"]}
    if not gguf.value("expert_count"):
        return biases
    count, per_token = selected_experts(gguf)
    return biases | {
        "moe_num_experts": count,
        "moe_k": per_token,
        "moe_intermediate_size": gguf.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": gguf.count("expert_shared_count"),
        "moe_layer_start_index": gguf.count("leading_dense_block_count"),
        "moe_layer_interval": gguf.integer("interleave_moe_layer_step", 1),
    }


def mistral3_fields(gguf: GgufFile, config: Config) -> Config:
    rope = config["rope_parameters"]
    if multiplier := gguf.number(_MULTIPLIER, 0.0):
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier)
    rope["llama_4_scaling_beta"] = gguf.number(_TEMPERATURE, 0.0)
    return {"sliding_window": None}


def minimax_fields(gguf: GgufFile, config: Config) -> Config:
    count, per_token = selected_experts(gguf)
    return {
        "num_local_experts": count,
        "num_experts_per_tok": per_token,
        "intermediate_size": gguf.integer("expert_feed_forward_length", config["intermediate_size"]),
    }


def hunyuan_moe_fields(gguf: GgufFile, config: Config) -> Config:
    count, per_token = selected_experts(gguf)
    return {
        "num_experts": count,
        "moe_topk": per_token,
        "intermediate_size": gguf.integer("expert_feed_forward_length", config["intermediate_size"]),
    }


def llama4_fields(gguf: GgufFile, config: Config) -> Config:
    """Add what llama.cpp takes from the number of experts: Maverick, with 128, has no norms of queries and
    keys. A window of 0 says that all layers turn and see everything. Chunks are those that were published.
    """
    layers, (count, per_token) = config["num_hidden_layers"], selected_experts(gguf)
    found: Config = {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": gguf.integer("expert_feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": per_token,
        "interleave_moe_layer_step": gguf.integer("interleave_moe_layer_step", 1),
        "use_qk_norm": count != 128,
    }
    if gguf.value("attention.sliding_window") == 0:
        found |= {"layer_types": [FULL] * layers, "no_rope_layers": [1] * layers}
    return found


def bert_fields(gguf: GgufFile, _config: Config) -> Config:
    types = gguf.tensors.get("token_types.weight")
    found: Config = {
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": 0 if types is None else types.shape[0],
    }
    if has_scores(gguf):
        name = "DistilBert" if _is_distilled(gguf) else "Bert"
        found |= {"architectures": [f"{name}ForSequenceClassification"], **_labels(gguf)}
    return found


def _is_distilled(gguf: GgufFile) -> bool:
    """Return whether a file of BERT's architecture is a DistilBERT, whose head has another activation: it has
    words as BERT, not the pieces of RoBERTa and XLM-R, and no token types.
    """
    has_words = gguf.metadata.get("tokenizer.ggml.model") == "bert"
    return has_words and "token_types.weight" not in gguf.tensors


def _labels(gguf: GgufFile) -> Config:
    """Return the number of labels and, where the file has them, their names. Raises ModelError."""
    shape, names = gguf.tensors[SCORES].shape, gguf.value("classifier.output_labels")
    rows = shape[0] if len(shape) > 1 else 1
    if names is None:
        return {"num_labels": rows}
    if not isinstance(names, list) or len(names) != rows or not all(isinstance(name, str) for name in names):
        raise ModelError(
            f"{gguf.path}: {gguf.architecture}.classifier.output_labels must be {rows} texts, one for each "
            f"row of {SCORES}"
        )
    return {"num_labels": rows, "id2label": {str(idx): name for idx, name in enumerate(names)}}


def has_scores(gguf: GgufFile) -> bool:
    """Return whether it is a RoBERTa, XLM-R, DistilBERT or ModernBERT with the head of a reranker or
    classifier. Files of BERT's leave one of the two linears out.
    """
    has_head = gguf.architecture in {"bert", "modern-bert"}
    return has_head and {"cls.weight", SCORES} <= gguf.tensors.keys()


def nomic_fields(gguf: GgufFile, config: Config) -> Config:
    biases = {"qkv_proj_bias": "attn_qkv", "mlp_fc1_bias": "ffn_up", "mlp_fc2_bias": "ffn_down"}
    found = {key: f"blk.0.{name}.bias" in gguf.tensors for key, name in biases.items()}
    return bert_fields(gguf, config) | found


def nomic_moe_fields(gguf: GgufFile, config: Config) -> Config:
    """Add experts. A file has no bias of their sum, which llama.cpp's converter leaves out."""
    count, per_token = selected_experts(gguf)
    return nomic_fields(gguf, config) | {
        "num_experts": count,
        "moe_top_k": per_token,
        "moe_every_n_layers": gguf.integer("moe_every_n_layers"),
        "has_expert_bias": False,
    }


def jina_fields(gguf: GgufFile, config: Config) -> Config:
    more = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    return bert_fields(gguf, config) | more


def modern_fields(gguf: GgufFile, config: Config) -> Config:
    """Add what ModernBERT has beside other encoders. The first of each three layers has full attention where
    the file does not say it; the base of RoPE in sliding windows is that of the published models. Nor does it
    say which states a reranker's head gets: their mean, as with llama.cpp.
    """
    if has_scores(gguf):
        config |= {"architectures": ["ModernBertForSequenceClassification"], **_labels(gguf)}
        config |= {"classifier_pooling": "mean", "classifier_bias": "cls.bias" in gguf.tensors}
    rope, pattern = config.pop("rope_parameters"), gguf.value("attention.sliding_window_pattern", 3)
    if rope["rope_type"] != "default":
        raise ModelError(f"{gguf.path}: scaled RoPE of {gguf.architecture} cannot be read from GGUF")
    found: Config = {
        "norm_eps": gguf.number("attention.layer_norm_epsilon", 1e-5),
        "norm_bias": "output_norm.bias" in gguf.tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in gguf.tensors,
        "hidden_activation": gguf.value("hidden_activation", "gelu"),
        "local_attention": gguf.integer("attention.sliding_window"),
        "global_rope_theta": gguf.number("rope.freq_base", 160000.0),
        "local_rope_theta": gguf.number("rope.freq_base_swa", 10000.0),
    }
    if isinstance(pattern, list):
        return found | {"layer_types": sliding_types(gguf, config["num_hidden_layers"])}
    return found | {"global_attn_every_n_layers": gguf.integer("attention.sliding_window_pattern", 3)}


def layer_norm_fields(gguf: GgufFile, _config: Config) -> Config:
    """Return what GPT-2, Phi and Starcoder2 have: the epsilon of LayerNorms, and a window of all layers."""
    window = gguf.value("attention.sliding_window") or None
    return {"rms_norm_eps": gguf.number("attention.layer_norm_epsilon", 1e-5), "sliding_window": window}


def gpt_neox_fields(gguf: GgufFile, config: Config) -> Config:
    is_parallel = bool(gguf.value("use_parallel_residual", True))
    return layer_norm_fields(gguf, config) | {"use_parallel_residual": is_parallel, "qkv_in_order": True}


def falcon_fields(gguf: GgufFile, config: Config) -> Config:
    """Tell the architecture of Falcon 11B and 40B, which have several KV heads, from that of Falcon 7B."""
    kv_heads, norms = config["num_key_value_heads"], 1 + ("blk.0.attn_norm_2.weight" in gguf.tensors)
    found: Config = {"qkv_in_order": True, "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms}
    return layer_norm_fields(gguf, config) | found | {"new_decoder_architecture": kv_heads > 1}


def stablelm_fields(gguf: GgufFile, config: Config) -> Config:
    """Return what distinguishes the models of StableLM: attention and MLP side by side in the 12B, whose
    LayerNorms of heads are one tensor.
    """
    has_norms = "blk.0.attn_q_norm.weight" in gguf.tensors
    return {
        "layer_norm_eps": gguf.number("attention.layer_norm_epsilon", 1e-5),
        "use_qkv_bias": config["attention_bias"],
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in gguf.tensors,
        "qk_layernorm": has_norms,
        "qk_layernorm_stacked": has_norms,
    }
