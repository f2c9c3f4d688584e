"""Keys of config.json that GGUF files of hybrids say in a way of their own, or leave out. Torch-free."""

from .families import FULL, LINEAR, Config, latent_fields, multipliers, routed_experts, selected_experts
from .reader import GgufFile


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
    return multipliers(gguf) | {
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
    return {
        "num_heads": heads,
        "head_dim": values // heads,
        "expand": values / config["hidden_size"],
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "state_size": gguf.integer("ssm.state_size"),
        "n_groups": gguf.integer("ssm.group_count"),
        "conv_kernel": gguf.integer("ssm.conv_kernel"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in gguf.tensors,
        "use_bias": "blk.0.ssm_in.bias" in gguf.tensors,
    }


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
