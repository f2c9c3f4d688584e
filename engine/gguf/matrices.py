"""Shapes of a GGUF file's matrices as its metadata say, checked from its header alone. Torch-free."""

from typing import Any

from llmbox.kernels.activation import UNGATED

from ..checkpoint.safetensors import shown
from ..errors import ModelError
from .architectures import architecture_of
from .config import config_of
from .families import has_scores
from .names import SCORES
from .reader import GgufFile

Shapes = dict[str, tuple[int, ...]]


def check_matrices(gguf: GgufFile) -> None:
    """Raise ModelError for the first matrix that is missing or has another shape than the metadata say."""
    config = config_of(gguf)
    for layer in range(config["num_hidden_layers"]):
        for part, shape in matrices_of(gguf, config, layer).items():
            _check(gguf, f"blk.{layer}.{part}.weight", shape)
    if has_scores(gguf):
        hidden, labels = config["hidden_size"], config["num_labels"]
        _check(gguf, "cls.weight", (hidden, hidden))
        if config.get("classifier_bias", True):
            _check(gguf, "cls.bias", (hidden,))
        _check(gguf, SCORES, (labels, hidden) if len(gguf.tensors[SCORES].shape) > 1 else (hidden,))
        _check(gguf, "cls.output.bias", (labels,))


def _check(gguf: GgufFile, name: str, shape: tuple[int, ...]) -> None:
    entry = gguf.tensors.get(name)
    if entry is None:
        raise ModelError(f"{gguf.path}: tensor {shown(name)} is missing: the file is incomplete")
    if entry.shape != shape:
        raise ModelError(
            f"{entry.file}: tensor {shown(name)} has shape {list(entry.shape)}, "
            f"the file's metadata require {list(shape)}"
        )


def matrices_of(gguf: GgufFile, config: dict[str, Any], layer: int) -> Shapes:
    """Return the shapes of a layer's matrices by their names in GGUF."""
    found: Shapes
    if architecture_of(gguf).is_encoder and "use_bidirectional_attention" not in config:
        return _encoder(gguf, config, layer)
    if blocks := config.get("block_configs"):
        attention, mlp = blocks[layer]["attention"], blocks[layer]["ffn"]
        found = {} if attention["no_op"] else _attention(gguf, config, layer)
        return found if mlp["no_op"] else found | _mlp(gguf, config | mlp, layer)
    kind, found = kind_of(config, layer), {}
    if kind == "full_attention":
        found |= _latent(gguf, config) if config.get("kv_lora_rank") else _attention(gguf, config, layer)
        if config.get("indexer_types", ["shared"] * (layer + 1))[layer] == "full":
            found |= _indexer(config)
        if "mamba_d_ssm" in config:
            found |= _mamba(gguf, config)
    elif kind == "linear_attention":
        found |= (
            _delta(config)
            if "linear_num_key_heads" in config
            else _kimi_delta(config)
            if "linear_head_dim" in config
            else _mamba(gguf, config)
        )
    elif kind == "conv":
        hidden = config["hidden_size"]
        found |= {"shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}
    if "layers_block_type" not in config or kind in ("mlp", "moe"):
        found |= _mlp(gguf, config, layer)
    return found


def _encoder(gguf: GgufFile, config: dict[str, Any], layer: int) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    rows = {"attn_q": hidden, "attn_k": hidden, "attn_v": hidden}
    if f"blk.{layer}.attn_qkv.weight" in gguf.tensors:
        rows = {"attn_qkv": 3 * hidden}
    names = architecture_of(gguf).layer
    is_gated = config["model_type"] == "jina_bert" or config.get("hidden_act") == "silu"
    if (every := config.get("moe_every_n_layers")) and layer % every == 1:
        experts = config["num_experts"]
        found: Shapes = {name: (count, hidden) for name, count in rows.items()}
        found |= {"attn_output": (hidden, hidden), "ffn_up_exps": (experts, inner, hidden)}
        return found | {"ffn_down_exps": (experts, hidden, inner)}
    if "mlp.gate_up_proj" in names:
        rows["ffn_up"] = 2 * inner
    else:
        rows |= dict.fromkeys(("ffn_up", "ffn_gate") if is_gated else ("ffn_up",), inner)
    found = {name: (count, hidden) for name, count in rows.items()}
    return found | {"attn_output": (hidden, hidden), "ffn_down": (hidden, inner)}


def kind_of(config: dict[str, Any], layer: int) -> str:
    """Return what a layer has: full_attention (with a window or not), linear_attention, conv, mlp or moe."""
    types = config.get("layers_block_type") or config.get("layer_types")
    if "num_attention_heads" not in config:
        return "linear_attention"
    if "full_attention_interval" in config:
        every = config["full_attention_interval"]
        return "linear_attention" if (layer + 1) % every else "full_attention"
    kind = str(types[layer]) if types else "full_attention"
    return "full_attention" if kind == "sliding_attention" else kind


def _attention(gguf: GgufFile, config: dict[str, Any], layer: int) -> Shapes:
    hidden, head_dim, kv_heads = config["hidden_size"], config["head_dim"], config["num_key_value_heads"]
    equal = False
    if "global_head_dim" in config and config["layer_types"][layer] == "full_attention":
        head_dim, equal = config["global_head_dim"], config["attention_k_eq_v"]
        kv_heads = config["num_global_key_value_heads"] if equal else kv_heads
    queries, keys = config["num_attention_heads"] * head_dim, kv_heads * head_dim
    gates = queries if "full_attention_interval" in config else 0
    output = {"attn_output": (hidden, queries)}
    if f"blk.{layer}.attn_qkv.weight" in gguf.tensors:
        return {"attn_qkv": (queries + 2 * keys, hidden), **output}
    shared = layer >= config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    pairs: Shapes = {} if shared else {"attn_k": (keys, hidden)}
    if not shared and not equal:
        pairs["attn_v"] = (keys, hidden)
    return {"attn_q": (queries + gates, hidden), **pairs, **output}


def _latent(gguf: GgufFile, config: dict[str, Any]) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    keys, values, turned = (config[key] for key in ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"))
    queries, inputs = heads * (keys + turned), config["q_lora_rank"]
    found: Shapes = {"attn_kv_a_mqa": (rank + turned, hidden), "attn_output": (hidden, heads * values)}
    if inputs:
        found |= {"attn_q_a": (inputs, hidden), "attn_q_b": (queries, inputs)}
    else:
        found["attn_q"] = (queries, hidden)
    if any(name.endswith(".attn_kv_b.weight") for name in gguf.tensors):
        return found | {"attn_kv_b": (heads * (keys + values), rank)}
    return found | {"attn_k_b": (heads, rank, keys), "attn_v_b": (heads, values, rank)}


def _indexer(config: dict[str, Any]) -> Shapes:
    heads, width, hidden = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    queries = {"indexer.attn_q_b": (heads * width, config["q_lora_rank"])}
    return {**queries, "indexer.attn_k": (width, hidden), "indexer.proj": (heads, hidden)}


def _mamba1(gguf: GgufFile, hidden: int) -> Shapes:
    values, rank = gguf.integer("ssm.inner_size"), gguf.integer("ssm.time_step_rank")
    return {
        "ssm_in": (2 * values, hidden),
        "ssm_conv1d": (values, gguf.integer("ssm.conv_kernel")),
        "ssm_x": (rank + 2 * gguf.integer("ssm.state_size"), values),
        "ssm_dt": (values, rank),
        "ssm_out": (hidden, values),
    }


def _mamba(gguf: GgufFile, config: dict[str, Any]) -> Shapes:
    if gguf.architecture in {"mamba", "jamba"}:
        return _mamba1(gguf, config["hidden_size"])
    hidden, values, heads = (
        config["hidden_size"],
        gguf.integer("ssm.inner_size"),
        gguf.integer("ssm.time_step_rank"),
    )
    channels = values + 2 * gguf.integer("ssm.group_count") * gguf.integer("ssm.state_size")
    return {
        "ssm_in": (values + channels + heads, hidden),
        "ssm_conv1d": (channels, gguf.integer("ssm.conv_kernel")),
        "ssm_out": (hidden, values),
    }


def _delta(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    keys, values = (
        config[f"linear_num_{kind}_heads"] * config[f"linear_{kind}_head_dim"] for kind in ("key", "value")
    )
    return {
        "attn_qkv": (2 * keys + values, hidden),
        "attn_gate": (values, hidden),
        "ssm_conv1d": (2 * keys + values, config["linear_conv_kernel_dim"]),
        "ssm_out": (hidden, values),
    }


def _kimi_delta(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["linear_head_dim"]
    rows = config["linear_num_heads"] * inner
    return {
        **{f"attn_{part}": (rows, hidden) for part in "qkv"},
        **{f"ssm_{gate}_a": (inner, hidden) for gate in "fg"},
        **{f"ssm_{gate}_b": (rows, inner) for gate in "fg"},
        "attn_output": (hidden, rows),
    }


def _mlp(gguf: GgufFile, config: dict[str, Any], layer: int) -> Shapes:
    if "num_attention_heads" not in config:
        return {}
    hidden, inner = config["hidden_size"], config.get("intermediate_size_mlp") or config["intermediate_size"]
    inner = inner[layer] if isinstance(inner, list) else inner
    own = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
    if config.get("use_double_wide_mlp") and layer >= own:
        inner *= 2
    gated = config.get("hidden_act") not in UNGATED and config.get("mlp_hidden_act") not in UNGATED
    experts = gguf.value("expert_count")
    if experts and f"blk.{layer}.ffn_down.weight" not in gguf.tensors:
        rows, width = gguf.value("expert_feed_forward_length", inner), config.get("moe_latent_size") or hidden
        if f"blk.{layer}.ffn_gate_up_exps.weight" in gguf.tensors:
            both = {"ffn_gate_up_exps": (experts, 2 * rows, width)}
            return both | {"ffn_down_exps": (experts, width, rows)}
        gate = {"ffn_gate_exps": (experts, rows, width)} if gated else {}
        found: Shapes = {
            "ffn_up_exps": (experts, rows, width),
            "ffn_down_exps": (experts, width, rows),
            **gate,
        }
        return found
    inner = config.get("shared_intermediate_size", inner)
    if gated and f"blk.{layer}.ffn_gate.weight" not in gguf.tensors and _has_stacks(gguf):
        return {"ffn_up": (2 * inner, hidden), "ffn_down": (hidden, inner)}
    more: Shapes = {"ffn_gate": (inner, hidden)} if gated else {}
    return {"ffn_up": (inner, hidden), "ffn_down": (hidden, inner), **more}


def _has_stacks(gguf: GgufFile) -> bool:
    """Return whether files of the architecture have gate and up of MLPs as one tensor."""
    return gguf.architecture in {"phi3", "glm4"}
