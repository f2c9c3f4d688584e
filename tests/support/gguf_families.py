"""GGUF files of tiny models of newer families, as llama.cpp's converter writes them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from .families import YARN
from .gguf_models import add_blocks_or_floats, add_tokenizer, add_value, side_by_side, write_all
from .tiny_models import make_tiny_model, write_json

Arrays = dict[str, np.ndarray]

DENSE_NEMOTRON = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
SPARSE_NEMOTRON = ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]
COHERE2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "tie_word_embeddings": True,
}
GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}
LLAMA4: dict[str, Any] = {
    "moe_layers": None,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_bias": False,
}
GROWING = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
LATENT = {"GLM_DSA", "DEEPSEEK2", "MISTRAL4", "KIMI_LINEAR"}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", "GPT_OSS", {}),
    "qwen2moe": ("qwen2_moe", "QWEN2MOE", {"mlp_only_layers": []}),
    "qwen3next": ("qwen3_next", "QWEN3NEXT", {}),
    "qwen35": ("qwen3_5_text", "QWEN35", {}),
    "qwen35moe": ("qwen3_5_moe_text", "QWEN35MOE", {}),
    "glm4": ("glm4", "GLM4", {}),
    "glm4moe": ("glm4_moe", "GLM4_MOE", {}),
    "deepseek3": (
        "deepseek_v3",
        "DEEPSEEK2",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek2": ("deepseek_v2", "DEEPSEEK2", {}),
    "glm4-flash": ("glm4_moe_lite", "DEEPSEEK2", {"attention_bias": False}),
    "glm-dsa": ("glm_moe_dsa", "GLM_DSA", {}),
    "youtu": ("youtu", "DEEPSEEK2", {}),
    "dots1": ("dots1", "DOTS1", {"sliding_window": None, "max_window_layers": 2}),
    "bailingmoe2": ("glm4_moe", "BAILINGMOE2", {"attention_bias": False, "num_nextn_predict_layers": 0}),
    "minimax-m2": ("minimax_m2", "MINIMAXM2", {}),
    "mistral3": ("ministral3", "MISTRAL3", {}),
    "mistral4": ("mistral4", "MISTRAL4", {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.1}}),
    "mistral-large3": ("mistral4", "DEEPSEEK2", {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.5}}),
    "phi3": ("phi3", "PHI3", {}),
    "granitemoe": ("granitemoe", "GRANITE_MOE", {}),
    "granitemoe-shared": ("granitemoeshared", "GRANITE_MOE", {}),
    "granitehybrid": ("granitemoehybrid", "GRANITE_HYBRID", {}),
    "granitehybrid-moe": (
        "granitemoehybrid",
        "GRANITE_HYBRID",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "nope"},
    ),
    "nemotron_h": ("nemotron_h", "NEMOTRON_H", {"layers_block_type": DENSE_NEMOTRON}),
    "nemotron_h_moe": (
        "nemotron_h",
        "NEMOTRON_H_MOE",
        {"layers_block_type": SPARSE_NEMOTRON, "moe_latent_size": 40},
    ),
    "falcon-mamba": ("falcon_mamba", "MAMBA", {"mixer_rms_eps": 1e-6}),
    "jamba": ("jamba", "JAMBA", {}),
    "mamba": ("mamba", "MAMBA", {"use_bias": False}),
    "mamba2": ("mamba2", "MAMBA2", {"use_bias": False}),
    "olmo": ("olmo", "OLMO", {"attention_bias": False}),
    "olmo2": ("olmo2", "OLMO2", {}),
    "olmo3": ("olmo3", "OLMO2", {}),
    "olmoe": ("olmoe", "OLMOE", {}),
    "exaone": ("llama", "EXAONE", {}),
    "internlm2": ("llama", "INTERNLM2", {}),
    "minicpm": ("granite", "MINICPM", {"attention_multiplier": 0.25, "tie_word_embeddings": True}),
    "exaone4": ("exaone4", "EXAONE4", {}),
    "command-r": ("cohere", "COMMAND_R", {}),
    "command-r-plus": ("cohere", "COMMAND_R", {"use_qk_norm": True}),
    "cohere2": ("cohere2", "COHERE2", COHERE2),
    "ernie4_5": ("ernie4_5", "ERNIE4_5", {"use_bias": False}),
    "ernie4_5-moe": ("ernie4_5_moe", "ERNIE4_5_MOE", {"moe_layer_start_index": 1}),
    "hunyuan-dense": ("hunyuan_v1_dense", "HUNYUAN_DENSE", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", "HUNYUAN_MOE", {}),
    "lfm2moe": ("lfm2_moe", "LFM2MOE", {}),
    "llama4": ("llama4_text", "LLAMA4", LLAMA4),
    "kimi-linear": ("kimi_linear", "KIMI_LINEAR", {}),
    "falcon-h1": ("falcon_h1", "FALCON_H1", {"projectors_bias": False}),
    "seed_oss": ("seed_oss", "SEED_OSS", {}),
    "gpt2": ("gpt2", "GPT2", {}),
    "gptneox": ("gpt_neox", "GPTNEOX", {}),
    "falcon": ("falcon", "FALCON", {}),
    "falcon-new": ("falcon", "FALCON", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi2": ("phi", "PHI2", {}),
    "stablelm": ("stablelm", "STABLELM", {}),
    "stablelm-12b": (
        "stablelm",
        "STABLELM",
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False},
    ),
    "starcoder": ("gpt_bigcode", "STARCODER", {}),
    "starcoder2": ("starcoder2", "STARCODER2", {}),
    "gemma3n": ("gemma3n_text", "GEMMA3N", {}),
    "gemma4": ("gemma4_text", "GEMMA4", {}),
    "gemma4-moe": ("gemma4_text", "GEMMA4", GEMMA4_MOE),
    "gemma4-unified": ("gemma4_unified_text", "GEMMA4", {}),
}
"""`model_type`, llama.cpp's architecture, and fields of config.json that its files cannot say otherwise."""


def make_source(directory: Path, family: str, **changes: Any) -> Path:
    kind, _, fixed = FAMILIES[family]
    return make_tiny_model(directory, arch=kind, **fixed | changes)


def write_family(
    model: Path,
    file: Path,
    family: str,
    kind: str | Callable[[str], str] = "F32",
    *,
    extra: Mapping[str, list[float]] | None = None,
    **metadata: Any,
) -> Path:
    """Write `model` with matrices in `kind`, which may be a function of a tensor's name. `extra`: further
    tensors. `metadata`: further keys of the architecture, dots as two underscores.
    """
    config = with_usual_keys(json.loads((model / "config.json").read_text()))
    arch = gguf.MODEL_ARCH[FAMILIES[family][1]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    add_settings(writer, arch.name, config)
    for key, value in metadata.items():
        name = f"{gguf.MODEL_ARCH_NAMES[arch]}.{key.replace('__', '.')}"
        add_value(writer, name, value)
    add_tokenizer(writer, model)
    for seed, (name, array) in enumerate(tensors_of(model, arch, config)):
        add_blocks_or_floats(writer, name, array, kind, seed)
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, np.array(numbers, dtype=np.float32))
    write_all(writer)
    return file


def with_usual_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that most families have under other names."""
    kind, names = config["model_type"], {"n_embd": "hidden_size", "n_head": "num_attention_heads"}
    names |= {"n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings"}
    names |= {"n_inner": "intermediate_size", "norm_epsilon": "rms_norm_eps"}
    config |= {usual: config[name] for name, usual in names.items() if name in config}
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if kind == "gpt_bigcode":
        heads = 1
    if kind == "falcon":
        heads = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    return config | {"num_key_value_heads": heads}


def tensors_of(
    model: Path, arch: gguf.MODEL_ARCH, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    names = gguf.get_tensor_name_map(arch, layers_of(config) + config.get("num_nextn_predict_layers", 0))
    for name, array in converted(load_file(model / "model.safetensors"), arch.name, config).items():
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith(".router.scale"):
            place = f"blk.{name.split('.')[2]}.ffn_gate_inp.scale"
        elif name.endswith(".per_expert_scale"):
            place = f"blk.{name.split('.')[2]}.ffn_down_exps.scale"
        assert place is not None, name
        yield place, np.ascontiguousarray(array)
    if arch.name == "GEMMA4":
        width = full_sizes(config)["head_dim"] // 2
        turned = int(width * rope_of(config)["partial_rotary_factor"])
        yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (width - turned), dtype=np.float32)
    if arch.name == "PHI3" and (factors := rope_of(config).get("long_factor")):
        yield "rope_factors_long.weight", np.array(factors, dtype=np.float32)
        yield "rope_factors_short.weight", np.array(rope_of(config)["short_factor"], dtype=np.float32)


def full_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Sizes of layers of full attention of a Gemma 4."""
    usual = {key: config[key] for key in ("head_dim", "num_key_value_heads")}
    return usual | next(iter(config["per_layer_config"].values()))


def layers_of(config: dict[str, Any]) -> int:
    return int(config.get("num_hidden_layers") or len(config["layers_block_type"]))


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return dict(rope.get("full_attention", rope))


def converted(arrays: Arrays, arch: str, config: dict[str, Any]) -> Arrays:
    """Return tensors as the converter maps them: their values, and names that its table knows."""
    arrays = {re.sub(r"^backbone\.", "backbone.", name): array for name, array in arrays.items()}
    if arch.startswith("QWEN3") and "linear_num_value_heads" in config:
        arrays = of_delta_nets(arrays, arch, config)
    if arch in {"GRANITE_HYBRID", "NEMOTRON_H", "NEMOTRON_H_MOE", "MAMBA2"}:
        arrays = of_mamba2(arrays, arch, config)
    if arch.startswith("GRANITE"):
        arrays = of_granite(arrays, config)
    rules: dict[str, Callable[[Arrays, dict[str, Any]], Arrays]] = {
        "BAILINGMOE2": of_bailing,
        "MAMBA": of_mamba1,
        "JAMBA": of_mamba1,
        "GPT_OSS": of_gpt_oss,
        "DEEPSEEK2": of_mistral_large3 if config["model_type"] == "mistral4" else of_deepseek,
        "MISTRAL4": of_mistral4,
        "GLM_DSA": of_deepseek,
        "GEMMA3N": of_gemma3n,
        "LLAMA4": of_llama4,
        "KIMI_LINEAR": of_kimi,
        "FALCON_H1": of_falcon_h1,
        "GEMMA4": of_gemma4,
        "GPT2": of_gpt2,
        "GPTNEOX": with_stacks_in_order,
        "FALCON": with_stacks_in_order,
        "STABLELM": of_stablelm,
    }
    arrays = rules.get(arch, lambda found, _: found)(arrays, config)
    if arch in {"MISTRAL3", "GRANITE_MOE", "GRANITE_HYBRID", "OLMO", "INTERNLM2", "MINICPM"}:
        for name, array in arrays.items():
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if part in name:
                    arrays[name] = side_by_side(array, config[heads])
    if config.get("tie_word_embeddings"):
        arrays.pop("lm_head.weight", None)
    return with_correction(stacked_experts(arrays))


def with_correction(arrays: Arrays) -> Arrays:
    return {
        name.replace("e_score_correction_bias", "e_score_correction.bias"): a for name, a in arrays.items()
    }


LFM2_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stacked_experts(arrays: Arrays) -> Arrays:
    each: dict[str, dict[int, np.ndarray]] = {}
    others: Arrays = {}
    for full, array in arrays.items():
        name = f"{full}.bias" if full.endswith("feed_forward.expert_bias") else full
        if found := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            place = re.sub(r"^backbone\.(.+)\.mixer\.experts", r"model.\1.mlp.experts", found[1])
            part = LFM2_PARTS.get(found[3], found[3]) if "feed_forward" in place else found[3]
            each.setdefault(f"{place}.{part}.weight", {})[int(found[2])] = array
        else:
            others[name] = array
    return others | {name: np.stack([found[i] for i in range(len(found))]) for name, found in each.items()}


def tiled(array: np.ndarray, config: dict[str, Any], axis: int = 0) -> np.ndarray:
    """Value heads in the order in which key heads repeat."""
    keys = config["linear_num_key_heads"]
    each = config["linear_num_value_heads"] // keys
    moved = np.moveaxis(array, axis, 0)
    heads = moved.reshape(keys, each, -1, *moved.shape[1:]).swapaxes(0, 1).reshape(moved.shape)
    return np.moveaxis(heads, 0, axis)


def of_delta_nets(arrays: Arrays, arch: str, config: dict[str, Any]) -> Arrays:
    found: Arrays = {}
    keys, is_tiled = config["linear_num_key_heads"] * config["linear_key_head_dim"], arch != "QWEN3NEXT"
    for full, stored in arrays.items():
        name, array = full, stored
        part = name.rpartition(".linear_attn.")[2]
        if is_tiled and part != name:
            if part in {"in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"}:
                array = tiled(array, config)
            elif part in {"in_proj_qkv.weight", "conv1d.weight"}:
                array = np.concatenate([array[: 2 * keys], tiled(array[2 * keys :], config)])
            elif part == "out_proj.weight":
                array = tiled(array, config, 1)
        if part == "A_log":
            array = -np.exp(array)
        elif part == "dt_bias":
            name = name.replace("dt_bias", "dt_proj.bias")
        elif part == "conv1d.weight":
            array = array.squeeze()
        elif name.endswith("norm.weight") and part != "norm.weight":
            array = array + 1
        if part == "in_proj_qkvz.weight":
            widths = [config["linear_key_head_dim"]] * 2
            group = config["linear_num_value_heads"] // config["linear_num_key_heads"]
            widths += [group * config["linear_value_head_dim"]] * 2
            heads = array.reshape(config["linear_num_key_heads"], sum(widths), -1)
            q, k, v, z = np.split(heads, np.cumsum(widths)[:-1], axis=1)
            rows = [each.reshape(-1, array.shape[1]) for each in (q, k, v, z)]
            found[name.replace("in_proj_qkvz", "in_proj_qkv")] = np.concatenate(rows[:3])
            name, array = name.replace("in_proj_qkvz", "in_proj_z"), rows[3]
        found[name.replace("linear_attn.in_proj_qkv.", "self_attn.qkv_proj.")] = array
    return split_gate_ups(found)


def split_gate_ups(arrays: Arrays) -> Arrays:
    """Gates and ups of experts apart, where all experts are in one tensor."""
    found: Arrays = {}
    for name, array in arrays.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            found[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            found[name.replace("gate_up_proj", "up_proj.weight")] = up
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = array
    return found


def of_bailing(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    for layer in range(config["num_hidden_layers"]):
        module = f"model.layers.{layer}.self_attn"
        each = [arrays.pop(f"{module}.{part}_proj.weight") for part in "qkv"]
        arrays[f"model.layers.{layer}.attention.query_key_value.weight"] = np.concatenate(each)
    return arrays


def of_mamba1(arrays: Arrays, _config: dict[str, Any]) -> Arrays:
    found = {name: -np.exp(a) if name.endswith(".A_log") else a for name, a in arrays.items()}
    return {name: a.squeeze() if name.endswith("conv1d.weight") else a for name, a in found.items()}


def of_mamba2(arrays: Arrays, arch: str, config: dict[str, Any]) -> Arrays:
    groups = config.get("n_groups") or config["mamba_n_groups"]
    dt = "dt.bias" if arch == "NEMOTRON_H_MOE" else "dt_proj.bias"
    found: Arrays = {}
    for name, array in arrays.items():
        if name.endswith(".A_log"):
            found[name] = -np.exp(array).reshape(-1, 1)
        elif name.endswith(".D"):
            found[name] = array.reshape(-1, 1)
        elif name.endswith(".dt_bias"):
            found[name.replace("dt_bias", dt)] = array
        elif name.endswith("conv1d.weight"):
            found[name] = array.squeeze()
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            found[name] = array.reshape(groups, -1)
        else:
            found[name] = array
    return found


def of_granite(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    found: Arrays = {}
    experts = config.get("num_local_experts")
    for name, array in arrays.items():
        module = name.rpartition(".")[0]
        if name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = np.split(array, 2, axis=1)
            base = module.replace("block_sparse_moe.input_linear", "block_sparse_moe.experts")
            layer = base.replace("block_sparse_moe.experts", "mlp.experts")
            found |= {f"{layer}.gate_proj.weight": gate, f"{layer}.up_proj.weight": up}
        elif name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(array, 2)
            place = "mlp.shared_expert" if experts else "mlp"
            base = module.replace("shared_mlp.input_linear", place)
            found |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
        elif name.endswith("shared_mlp.output_linear.weight"):
            place = "mlp.shared_expert" if experts else "mlp"
            found[name.replace("shared_mlp.output_linear", f"{place}.down_proj")] = array
        else:
            found[name] = array
    return found


def of_gpt2(arrays: Arrays, _config: dict[str, Any]) -> Arrays:
    return {name: a.T if a.ndim == 2 and ".c_" in name else a for name, a in arrays.items()}


def of_stablelm(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    """Norms of heads as one tensor."""
    found = {name: a for name, a in arrays.items() if "_layernorm.norms." not in name}
    for layer in range(config["num_hidden_layers"] if config["qk_layernorm"] else 0):
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            name = f"model.layers.{layer}.self_attn.{part}_layernorm"
            each = [arrays[f"{name}.norms.{head}.weight"] for head in range(config[heads])]
            found[f"{name}.weight"] = np.stack(each)
    return found


def with_stacks_in_order(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    """All queries before all keys and values."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found = dict(arrays)
    for name, array in arrays.items():
        if "query_key_value" in name:
            parts = array.reshape(kv_heads, heads // kv_heads + 2, -1, *array.shape[1:])
            split = (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])
            found[name] = np.concatenate([each.reshape(-1, *array.shape[1:]) for each in split])
    return found


def of_gpt_oss(arrays: Arrays, _config: dict[str, Any]) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        if "gate_up_proj" in name:
            kind = "bias" if name.endswith("_bias") else "weight"
            rows = array if kind == "bias" else array.swapaxes(1, 2)
            base = name.removesuffix("_bias")
            for part, first in (("gate_proj", 0), ("up_proj", 1)):
                found[f"{base.replace('gate_up_proj', part)}.{kind}"] = rows[:, first::2]
        elif name.endswith("experts.down_proj_bias"):
            found[name.replace("_bias", ".bias")] = array
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = array.swapaxes(1, 2)
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = array
    return found


def of_llama4(arrays: Arrays, _config: dict[str, Any]) -> Arrays:
    found = {
        name: array.swapaxes(1, 2) if ".experts." in name and array.ndim == 3 else array
        for name, array in arrays.items()
    }
    return split_gate_ups(found)


def of_falcon_h1(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    """Multipliers inside the weights."""
    inside = config["attention_in_multiplier"]
    factors = {
        "embed_tokens.weight": config["embedding_multiplier"],
        "lm_head.weight": config["lm_head_multiplier"],
        "q_proj.weight": inside,
        "k_proj.weight": inside * config["key_multiplier"],
        "v_proj.weight": inside,
        "o_proj.weight": config["attention_out_multiplier"],
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
        "gate_proj.weight": config["mlp_multipliers"][0],
        "down_proj.weight": config["mlp_multipliers"][1],
    }
    values, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    rows = [values, values, groups, groups, config["mamba_n_heads"]]
    parts = np.repeat(np.array(config["ssm_multipliers"], dtype=np.float32), rows)[:, None]
    found: Arrays = {}
    for name, array in arrays.items():
        scaled = next((array * np.float32(by) for end, by in factors.items() if name.endswith(end)), array)
        if name.endswith("mamba.in_proj.weight"):
            scaled = array * (config["ssm_in_multiplier"] * parts)
        found[name] = scaled
    return of_mamba2(found, "FALCON_H1", config)


def of_deepseek(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    heads, keys = config["num_attention_heads"], config["qk_nope_head_dim"]
    found: Arrays = {}
    for name, array in arrays.items():
        if name.endswith("kv_b_proj.weight"):
            each = array.reshape(heads, -1, array.shape[-1])
            found[name.replace("kv_b", "k_b")] = each[:, :keys].swapaxes(1, 2)
            found[name.replace("kv_b", "v_b")] = each[:, keys:]
        else:
            found[name] = array
    return found


def of_mistral4(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    named = {f"{name}.weight" if name.endswith(stacks) else name: array for name, array in arrays.items()}
    return of_deepseek(named, config)


def of_mistral_large3(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    """As a DeepSeek, whose files have gates apart."""
    found: Arrays = {}
    for name, array in of_mistral4(arrays, config).items():
        if "gate_up_proj" in name:
            gates, ups = np.split(array, 2, axis=1)
            found[name.replace("gate_up", "gate")], found[name.replace("gate_up", "up")] = gates, ups
        else:
            found[name] = array
    return found


def of_kimi(arrays: Arrays, config: dict[str, Any]) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        if name.endswith(".A_log"):
            found[name] = -np.exp(array).reshape(1, -1)
        elif name.endswith(".dt_bias"):
            found[name.replace("dt_bias", "dt_proj.bias")] = array.reshape(-1)
        else:
            found[name] = array
    return of_deepseek(found, config)


def of_gemma4(arrays: Arrays, _config: dict[str, Any]) -> Arrays:
    named = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
    return {f"{name}.weight" if name.endswith(named) else name: array for name, array in arrays.items()}


def of_gemma3n(arrays: Arrays, _config: dict[str, Any]) -> Arrays:
    found: Arrays = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays):
        if match := re.fullmatch(r"(model\.altup_(?:unembed_)?projections)\.\d+\.weight", name):
            stacks.setdefault(f"{match[1]}.weight", []).append(arrays[name])
        else:
            found[f"{name}.weight" if name.endswith("_scale") else name] = arrays[name]
    return found | {name: np.stack(each) for name, each in stacks.items()}


GPT = {"GPT2", "GPTNEOX", "FALCON", "PHI2", "STARCODER2"}
LAYER_NORMS = GPT | {"COMMAND_R", "COHERE2", "OLMO"}


def add_settings(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config.get("max_position_embeddings") or config["model_max_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers_of(config))
    keys = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
    eps = next((config[key] for key in keys if key in config), 1e-5)
    (writer.add_layer_norm_eps if arch in LAYER_NORMS else writer.add_layer_norm_rms_eps)(eps)
    if arch in {"MAMBA", "MAMBA2"}:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        add_mamba(writer, config)
        if config["model_type"] == "falcon_mamba":
            writer.add_ssm_dt_b_c_rms(True)
        return
    heads, head_dim = config["num_attention_heads"], config.get("head_dim") or 16
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    if arch not in LATENT:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    add_rope(writer, arch, config, head_dim)
    add_experts(writer, arch, config)
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    if arch in {"GEMMA3N", "EXAONE4", "OLMO2"} and config.get("layer_types") and window:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if arch.startswith("GRANITE"):
        writer.add_attention_scale(config["attention_multiplier"])
    if arch.startswith("GRANITE") or arch == "MINICPM":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    elif arch == "LFM2MOE":
        is_full = [kind == "full_attention" for kind in config["layer_types"]]
        writer.add_head_count_kv([config["num_key_value_heads"] * full for full in is_full])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif arch == "FALCON_H1":
        add_mamba(writer, config)
    elif arch == "LLAMA4":
        writer.add_feed_forward_length(config["intermediate_size_mlp"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    elif arch == "JAMBA":
        add_mamba(writer, config)
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        is_full = [layer % period == offset for layer in range(layers_of(config))]
        writer.add_head_count_kv([config["num_key_value_heads"] * full for full in is_full])
    elif arch in {"GRANITE_HYBRID", "NEMOTRON_H", "NEMOTRON_H_MOE"}:
        add_mamba(writer, config)
        kinds = config.get("layers_block_type") or config["layer_types"]
        is_full = [kind in {"full_attention", "attention"} for kind in kinds]
        writer.add_head_count_kv([config["num_key_value_heads"] * full for full in is_full])
        if arch == "GRANITE_HYBRID":
            writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        else:
            inner = config["moe_intermediate_size" if arch.endswith("MOE") else "intermediate_size"]
            writer.add_feed_forward_length([inner * (kind in {"mlp", "moe"}) for kind in kinds])
    if arch in LATENT:
        add_latent(writer, config)
    if arch == "GLM_DSA":
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    if arch == "KIMI_LINEAR":
        writer.add_head_count_kv([int(kind == "full_attention") for kind in config["layer_types"]])
        writer.add_kda_head_dim(config["linear_head_dim"])
        writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim") or 4)
    if arch == "GEMMA3N":
        add_gemma3n(writer, config)
    if arch == "GEMMA4":
        add_gemma4(writer, config)


def add_rope(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any], head_dim: int) -> None:
    rope = rope_of(config)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if arch.startswith("HUNYUAN"):
        theta *= rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
    writer.add_rope_freq_base(theta)
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if arch not in LATENT:
        writer.add_rope_dimension_count(int(config.get("rotary_dim") or head_dim * part))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "DEEPSEEK2" and config["model_type"] == "mistral4":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch == "MISTRAL3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch == "PHI3" and rope.get("long_factor"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])


def add_experts(writer: gguf.GGUFWriter, arch: str, config: dict[str, Any]) -> None:
    keys = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((config[key] for key in keys if config.get(key)), 0)
    if not count or arch == "NEMOTRON_H":
        return
    writer.add_expert_count(count)
    each = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
    used = config.get("moe_topk") or next(config[key] for key in each if config.get(key))
    writer.add_expert_used_count(used[0] if isinstance(used, list) else used)
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    if not arch.startswith("GRANITE") and arch != "OLMOE":
        writer.add_expert_feed_forward_length(inner)
    shared = ("shared_expert_intermediate_size", "shared_intermediate_size")
    if width := next((config[key] for key in shared if config.get(key)), 0):
        writer.add_expert_shared_feed_forward_length(width)
    shared_counts = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
    if (number := next((config[key] for key in shared_counts if config.get(key)), None)) is not None:
        writer.add_expert_shared_count(number)
    dense = config.get("first_k_dense_replace", config.get("moe_layer_start_index"))
    dense = config.get("num_dense_layers", dense)
    if dense is None and "mlp_layer_types" in config:
        dense = config["mlp_layer_types"].count("dense")
    if dense is not None:
        writer.add_leading_dense_block_count(dense)
    if (scale := config.get("routed_scaling_factor")) is not None:
        writer.add_expert_weights_scale(scale)
    if config.get("norm_topk_prob") or config.get("moe_renormalize"):
        writer.add_expert_weights_norm(True)
    if groups := config.get("n_group"):
        writer.add_expert_group_count(groups)
        writer.add_expert_group_used_count(config["topk_group"])
    if arch == "NEMOTRON_H_MOE":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_moe_latent_size(config["moe_latent_size"])
    if arch in {"BAILINGMOE2", "GLM4_MOE", "DOTS1", "MINIMAXM2", "LFM2MOE", "KIMI_LINEAR"} or config[
        "model_type"
    ] in {
        "deepseek_v3",
        "glm4_moe_lite",
        "glm_moe_dsa",
    }:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    def of(*keys: str) -> int:
        return next(int(config[key]) for key in keys if config.get(key))

    if config["model_type"] in {"falcon_mamba", "jamba", "mamba"}:
        writer.add_ssm_conv_kernel(of("conv_kernel", "mamba_d_conv"))
        usual = 2 * config["hidden_size"]
        writer.add_ssm_inner_size(usual if "mamba_dt_rank" in config else config["intermediate_size"])
        writer.add_ssm_state_size(of("state_size", "mamba_d_state"))
        writer.add_ssm_time_step_rank(of("time_step_rank", "mamba_dt_rank"))
        return
    heads = of("mamba_num_heads", "mamba_n_heads", "num_heads")
    width = config.get("mamba_head_dim") or config.get("mamba_d_head") or config["head_dim"]
    values = 2 * config["hidden_size"] if width == "auto" else heads * width
    writer.add_ssm_conv_kernel(of("conv_kernel", "mamba_d_conv"))
    writer.add_ssm_inner_size(values)
    writer.add_ssm_state_size(of("ssm_state_size", "state_size", "mamba_d_state"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(of("n_groups", "mamba_n_groups"))


def add_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    if all_dims := rope_of(config).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * all_dims)


def add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    full, shared = full_sizes(config), config.get("num_kv_shared_layers") or 0
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    heads = config["num_key_value_heads"], full["num_key_value_heads"]
    writer.add_head_count_kv([heads[0] if each else heads[1] for each in slides])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    if config.get("use_double_wide_mlp"):
        inner, first = config["intermediate_size"], len(slides) - shared
        writer.add_feed_forward_length([inner * (1 + (layer >= first)) for layer in range(len(slides))])
    if config.get("enable_moe_block"):
        writer.add_expert_used_count(config["top_k_experts"])


def add_gemma3n(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    shares = config["activation_sparsity_pattern"]
    scales = [NormalDist().inv_cdf(share) if share else float("-inf") for share in shares]
    writer.add_activation_sparsity_scale(scales)


def rewrite_config(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    write_json(file, json.loads(file.read_text()) | changes)
