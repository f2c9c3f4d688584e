"""Keys of config.json of Gemma files, as `families.py` has those of others. Torch-free."""

from statistics import NormalDist

from ..errors import ModelError
from .families import FULL, SLIDING, Config, selected_experts, sliding_types
from .reader import GgufFile


def gemma_fields(gguf: GgufFile, config: Config) -> Config:
    """Add values that Gemma files omit: equal for all models of a generation except its largest."""
    largest = {"gemma2": 46, "gemma3": 62}.get(gguf.architecture) == config["num_hidden_layers"]
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    theta = 1e6 if gguf.architecture == "gemma3" else 1e4
    rope = config.pop("rope_parameters")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.value("attention.sliding_window"),
        "attn_logit_softcapping": gguf.value("attn_logit_softcapping"),
        "final_logit_softcapping": gguf.value("final_logit_softcapping"),
        "rope_theta": gguf.number("rope.freq_base", theta),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }


def gemma3n_fields(gguf: GgufFile, config: Config) -> Config:
    layers, rope = config["num_hidden_layers"], config.pop("rope_parameters")
    scales = gguf.value("activation_sparsity_scale")
    if not isinstance(scales, list) or not all(isinstance(each, float) for each in scales):
        raise ModelError(f"{gguf.path}: gemma3n.activation_sparsity_scale is no list of numbers")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": gguf.by_layer("feed_forward_length", layers),
        "layer_types": sliding_types(gguf, layers),
        "sliding_window": gguf.integer("attention.sliding_window"),
        "final_logit_softcapping": gguf.number("final_logit_softcapping", 30.0),
        "rope_theta": rope["rope_theta"],
        "rope_local_base_freq": 1e4,
        "num_kv_shared_layers": gguf.count("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": gguf.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": rows_of(gguf, "per_layer_token_embd.weight"),
        "laurel_rank": rows_of(gguf, "blk.0.laurel_l.weight"),
        "altup_num_inputs": gguf.integer("altup.num_inputs"),
        "altup_active_idx": gguf.count("altup.active_idx"),
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 6) for each in scales],
    }


def gemma4_fields(gguf: GgufFile, config: Config) -> Config:
    layers, heads = config["num_hidden_layers"], gguf.integer("attention.head_count")
    types, kv_heads = sliding_types(gguf, layers), gguf.by_layer("attention.head_count_kv", layers, heads)
    inner, shared = (
        gguf.by_layer("feed_forward_length", layers),
        gguf.count("attention.shared_kv_layers"),
    )
    own = [layer for layer in range(layers - shared) if types[layer] == FULL]
    few = {kind: {n for n, of in zip(kv_heads, types, strict=True) if of == kind} for kind in (FULL, SLIDING)}
    has_values = all(f"blk.{layer}.attn_v.weight" in gguf.tensors for layer in own)
    if any(len(each) != 1 for each in few.values()) or (has_values and few[FULL] != few[SLIDING]):
        raise ModelError(f"{gguf.path}: gemma4.attention.head_count_kv differs between layers of one kind")
    width = gguf.count("embedding_length_per_layer_input")
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    found: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": min(inner),
        "use_double_wide_mlp": min(inner) != max(inner),
        "num_attention_heads": heads,
        "num_key_value_heads": few[SLIDING].pop(),
        "num_global_key_value_heads": few[FULL].pop(),
        "attention_k_eq_v": not has_values,
        "head_dim": gguf.integer("attention.key_length_swa"),
        "global_head_dim": gguf.integer("attention.key_length"),
        "layer_types": types,
        "sliding_window": gguf.integer("attention.sliding_window"),
        "final_logit_softcapping": gguf.value("final_logit_softcapping"),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": width,
        "rope_parameters": {
            FULL: full | {"rope_theta": gguf.number("rope.freq_base", 1e6)},
            SLIDING: {"rope_type": "default", "rope_theta": gguf.number("rope.freq_base_swa", 1e4)},
        },
    }
    if not width:  # of the published models those without embeddings of layers
        found["use_bidirectional_attention"] = "vision"
    if width:
        found["vocab_size_per_layer_input"] = rows_of(gguf, "per_layer_token_embd.weight")
    if gguf.value("expert_count"):
        count, per_token = selected_experts(gguf)
        found |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": per_token}
        found["moe_intermediate_size"] = gguf.integer("expert_feed_forward_length")
    return found


def rows_of(gguf: GgufFile, name: str) -> int:
    """Return the rows of a tensor. Raises ModelError."""
    if name not in gguf.tensors:
        raise ModelError(f"{gguf.path}: tensor {name!r} is missing: it is no whole model")
    return gguf.tensors[name].shape[0]
