"""Keys of config.json of families whose layers differ from each other: Gemma and others with sliding
windows, and hybrids of attention and recurrent layers. Torch-free, as `families.py` has those of others.
"""

from statistics import NormalDist

from ..errors import ModelError
from .families import (
    FULL,
    LINEAR,
    SLIDING,
    Config,
    latent_fields,
    multipliers,
    qwen_experts,
    routed_experts,
    selected_experts,
    sliding_types,
)
from .reader import BLOCKS, GgufFile


def windows_by_type(gguf: GgufFile, config: Config) -> Config:
    """Add sliding windows: layers by a pattern in the file, else every fourth sees all."""
    window = gguf.value("attention.sliding_window") or None
    found: Config = {"sliding_window": window}
    if window and isinstance(gguf.value("attention.sliding_window_pattern"), list):
        found["layer_types"] = sliding_types(gguf, config["num_hidden_layers"])
    return found


def cohere_fields(gguf: GgufFile, config: Config) -> Config:
    eps = gguf.number("attention.layer_norm_epsilon", 1e-5)
    return windows_by_type(gguf, config) | {
        "layer_norm_eps": eps,
        "logit_scale": gguf.number("logit_scale", 1.0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors,
    }


def olmo_fields(gguf: GgufFile, _config: Config) -> Config:
    return {"clip_qkv": gguf.value("attention.clamp_kqv")}


def olmo2_fields(gguf: GgufFile, config: Config) -> Config:
    if not gguf.value("attention.sliding_window"):
        return {}
    rope = config.pop("rope_parameters")
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    olmo3 = {"architectures": ["Olmo3ForCausalLM"]}
    return windows_by_type(gguf, config) | olmo3 | {"rope_parameters": {FULL: rope, SLIDING: plain}}


def glm_dsa_fields(gguf: GgufFile, config: Config) -> Config:
    """Add latent attention, experts and indexers, which layers without tensors of one share."""
    layers = range(config["num_hidden_layers"])
    indexed = [f"blk.{layer}.indexer.attn_k.weight" in gguf.tensors for layer in layers]
    return {
        **latent_fields(gguf, config),
        **routed_experts(gguf, config),
        "index_n_heads": gguf.integer("attention.indexer.head_count"),
        "index_head_dim": gguf.integer("attention.indexer.key_length"),
        "index_topk": gguf.integer("attention.indexer.top_k"),
        "indexer_types": ["full" if each else "shared" for each in indexed],
    }


def qwen3_5_fields(gguf: GgufFile, config: Config) -> Config:
    """Add gated delta nets, whose linears are split in files as those of Qwen3.5."""
    heads, key_heads = gguf.integer("ssm.time_step_rank"), gguf.integer("ssm.group_count")
    width = gguf.integer("ssm.inner_size") // heads
    found: Config = {
        "full_attention_interval": gguf.integer("full_attention_interval", 4),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": gguf.integer("ssm.state_size"),
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": gguf.integer("ssm.conv_kernel"),
    }
    if has_tiled_outputs(gguf):
        found["linear_values_tiled"] = True
    if gguf.value("expert_count"):
        found |= qwen_experts(gguf, config, normalized=True)
    return found


def has_delta_nets(gguf: GgufFile) -> bool:
    return gguf.architecture in {"qwen3next", "qwen35", "qwen35moe"}


def has_tiled_values(gguf: GgufFile) -> bool:
    """Return whether value heads come as key heads repeat: the first ones of all key heads first."""
    heads, key_heads = gguf.value("ssm.time_step_rank"), gguf.value("ssm.group_count")
    return has_delta_nets(gguf) and gguf.architecture != "qwen3next" and heads != key_heads


def has_tiled_outputs(gguf: GgufFile) -> bool:
    """Return whether that order stays in the inputs of linears, whose blocks are wider than a head."""
    width = gguf.integer("ssm.inner_size") // gguf.integer("ssm.time_step_rank")
    ends = [entry for name, entry in gguf.tensors.items() if name.endswith(".ssm_out.weight")]
    return has_tiled_values(gguf) and any(width % BLOCKS[entry.dtype][0] for entry in ends)


def gemma_fields(gguf: GgufFile, config: Config) -> Config:
    """Add values that Gemma files omit: equal for all models of a generation except its largest."""
    largest = {"gemma2": 46, "gemma3": 62}.get(gguf.architecture) == config["num_hidden_layers"]
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    theta = 1e4 if gguf.architecture in {"gemma", "gemma2"} else 1e6
    rope = config.pop("rope_parameters")
    if rope["rope_type"] == "default" and gguf.value("vision.block_count"):
        rope = {"rope_type": "linear", "factor": 8.0}  # Ollama's files of Gemma 3 do not say it
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon", 1e-6),
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.value("attention.sliding_window"),
        "attn_logit_softcapping": gguf.value("attn_logit_softcapping"),
        "final_logit_softcapping": gguf.value("final_logit_softcapping"),
        "rope_theta": gguf.number("rope.freq_base", theta),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }


def gemma_embedding_fields(gguf: GgufFile, config: Config) -> Config:
    """Add values of a Gemma 3 in both directions. Its window is the whole width, of both sides together."""
    pattern = gguf.value("attention.sliding_window_pattern", 6)
    found = gemma_fields(gguf, config) | {
        "use_bidirectional_attention": True,
        "sliding_window": gguf.integer("attention.sliding_window"),
        "rope_local_base_freq": gguf.number("rope.freq_base_swa", 1e4),
    }
    if isinstance(pattern, list):
        return found | {"layer_types": sliding_types(gguf, config["num_hidden_layers"])}
    return found | {"sliding_window_pattern": gguf.integer("attention.sliding_window_pattern", 6)}


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
        raise ModelError(f"{gguf.path}: tensor {name!r} is missing: the file is incomplete")
    return gguf.tensors[name].shape[0]


def mamba2_sizes(gguf: GgufFile, hidden: int) -> Config:
    """Return the sizes of Mamba-2 layers under the names that most families have."""
    heads, values = gguf.integer("ssm.time_step_rank"), gguf.integer("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": values // heads,
        "mamba_d_state": gguf.integer("ssm.state_size"),
        "mamba_d_conv": gguf.integer("ssm.conv_kernel"),
        "mamba_n_groups": gguf.integer("ssm.group_count"),
        "mamba_expand": values // hidden,
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in gguf.tensors),
    }


def granite_hybrid_fields(gguf: GgufFile, config: Config) -> Config:
    layers, inner = config["num_hidden_layers"], gguf.value("expert_shared_feed_forward_length")
    attention = gguf.by_layer("attention.head_count_kv", layers)
    has_experts, turns = bool(gguf.value("expert_count")), gguf.value("rope.scaling.finetuned", False)
    experts = selected_experts(gguf) if has_experts else (0, 0)
    if not turns:
        config["rope_parameters"] = None
    return multipliers(gguf, config) | {
        "layer_types": [FULL if heads else LINEAR for heads in attention],
        "position_embedding_type": "rope" if turns else "nope",
        "num_local_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "shared_intermediate_size": inner or config["intermediate_size"],
        **mamba2_sizes(gguf, config["hidden_size"]),
    }


def lfm2_fields(gguf: GgufFile, config: Config) -> Config:
    """Layers without heads of keys are short convolutions."""
    heads = gguf.by_layer("attention.head_count_kv", config["num_hidden_layers"])
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": [FULL if count else "conv" for count in heads],
        "conv_L_cache": gguf.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in gguf.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe_fields(gguf: GgufFile, config: Config) -> Config:
    count, per_token = selected_experts(gguf)
    return lfm2_fields(gguf, config) | {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": gguf.integer("expert_feed_forward_length"),
        "num_dense_layers": gguf.count("leading_dense_block_count"),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in gguf.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": gguf.number("expert_weights_scale", 1.0),
    }


def nemotron_h_fields(gguf: GgufFile, config: Config) -> Config:
    layers, heads = config["num_hidden_layers"], gguf.integer("ssm.time_step_rank")
    attention = gguf.by_layer("attention.head_count_kv", layers)
    inner = gguf.by_layer("feed_forward_length", layers)
    has_experts = bool(gguf.value("expert_count"))
    kinds = [
        FULL if kv_heads else ("moe" if has_experts else "mlp") if rows else LINEAR
        for kv_heads, rows in zip(attention, inner, strict=True)
    ]
    found = {
        "layers_block_type": kinds,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "mamba_num_heads": heads,
        "mamba_head_dim": gguf.integer("ssm.inner_size") // heads,
        "n_groups": gguf.integer("ssm.group_count"),
        "ssm_state_size": gguf.integer("ssm.state_size"),
        "conv_kernel": gguf.integer("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in gguf.tensors),
    }
    if has_experts:
        found |= routed_experts(gguf, config)
        found |= {"moe_shared_expert_intermediate_size": gguf.integer("expert_shared_feed_forward_length")}
        found |= {"moe_latent_size": gguf.value("moe_latent_size")}
    return found


def mamba2_fields(gguf: GgufFile, config: Config) -> Config:
    heads, values = gguf.integer("ssm.time_step_rank"), gguf.integer("ssm.inner_size")
    return _mamba_fields(gguf, config) | {
        "num_heads": heads,
        "head_dim": values // heads,
        "expand": values / config["hidden_size"],
        "n_groups": gguf.integer("ssm.group_count"),
    }


def mamba1_fields(gguf: GgufFile, config: Config) -> Config:
    """A file says that Falcon-Mamba norms keys, but not by which epsilon: it gets the usual one."""
    if gguf.value("ssm.dt_b_c_rms"):
        config["architectures"] = ["FalconMambaForCausalLM"]
    return _mamba_fields(gguf, config) | {
        "intermediate_size": gguf.integer("ssm.inner_size"),
        "time_step_rank": gguf.integer("ssm.time_step_rank"),
    }


def _mamba_fields(gguf: GgufFile, config: Config) -> Config:
    return {
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "state_size": gguf.integer("ssm.state_size"),
        "conv_kernel": gguf.integer("ssm.conv_kernel"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in gguf.tensors,
        "use_bias": "blk.0.ssm_in.bias" in gguf.tensors,
    }


def jamba_fields(gguf: GgufFile, config: Config) -> Config:
    """Layers without heads of keys are Mamba 1, and those without an MLP have experts."""
    layers = range(config["num_hidden_layers"])
    attention = gguf.by_layer("attention.head_count_kv", len(layers))
    found = {
        "layer_types": [FULL if heads else LINEAR for heads in attention],
        "mamba_expand": gguf.integer("ssm.inner_size") / config["hidden_size"],
        "mamba_d_state": gguf.integer("ssm.state_size"),
        "mamba_d_conv": gguf.integer("ssm.conv_kernel"),
        "mamba_dt_rank": gguf.integer("ssm.time_step_rank"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in gguf.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in gguf.tensors),
        "num_experts": 1,
    }
    if gguf.value("expert_count"):
        is_dense = [f"blk.{layer}.ffn_down.weight" in gguf.tensors for layer in layers]
        found["num_experts"], found["num_experts_per_tok"] = selected_experts(gguf)
        found["mlp_layer_types"] = ["dense" if dense else "sparse" for dense in is_dense]
    return found


def falcon_h1_fields(gguf: GgufFile, config: Config) -> Config:
    """Add Mamba-2 beside attention. All multipliers are inside the weights of a file."""
    return {
        **mamba2_sizes(gguf, config["hidden_size"]),
        "mamba_d_ssm": gguf.integer("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in gguf.tensors,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": "blk.0.ssm_in.bias" in gguf.tensors,
        "projectors_bias": "blk.0.ssm_out.bias" in gguf.tensors,
    }


def kimi_linear_fields(gguf: GgufFile, config: Config) -> Config:
    """Add latent attention, and Kimi delta attention with as many heads in layers that have its tensors."""
    linear = [f"blk.{n}.ssm_conv1d_q.weight" in gguf.tensors for n in range(config["num_hidden_layers"])]
    experts = {_KIMI_NAMES.get(key, key): value for key, value in routed_experts(gguf, config).items()}
    return {
        **latent_fields(gguf, config),
        **experts,
        "layer_types": [LINEAR if is_linear else FULL for is_linear in linear],
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": gguf.integer("kda.head_dim"),
        "linear_conv_kernel_dim": gguf.integer("ssm.conv_kernel"),
    }


_KIMI_NAMES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
"""Keys of Kimi-Linear by those of DeepSeek."""
