"""GGUF files of tiny models, written by the library of those who made the format."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import load_file

from .tiny_models import EXPERT_LINEARS

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ARCHITECTURES |= {"qwen3_moe": "qwen3moe", "smollm3": "smollm3", "granite": "granite", "arcee": "arcee"}
ARCHITECTURES |= {"lfm2": "lfm2", "gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"}


SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,),
    "IQ3_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "NVFP4": (),
}  # fmt: skip
"""Where a block has numbers of 16 bits, which any bytes may not be."""


def random_blocks(kind: str, count: int, size: float = 1.0, seed: int = 3) -> np.ndarray:
    """Blocks of any bytes, but with scales of about `size`."""
    noise = np.random.default_rng(seed)
    raw = noise.integers(
        0, 256, (count, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]), dtype=np.uint8
    )
    for at in SCALES[kind]:
        scales = (noise.normal(size=(count, 1)) * size).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = 118 + raw[:, 0] % 12
    if kind == "IQ1_M":  # four bits of its scale are in each of four words
        scales = (noise.normal(size=(count, 1)) * size).astype(np.float16).view(np.uint16)
        for word in range(4):
            raw[:, 49 + 2 * word] &= 15
            raw[:, 49 + 2 * word] |= ((scales[:, 0] >> (4 * word) & 15) << 4).astype(np.uint8)
    return raw


def q4_k_m(tensor: str) -> str:
    """The mixture that llama.cpp calls Q4_K_M, roughly: values, down projections and table have 6 bits."""
    return "Q6_K" if tensor.split(".")[-2] in {"attn_v", "ffn_down", "token_embd"} else "Q4_K"


_LARGEST = {
    "Q2_K": 15 * 3,
    "Q3_K": 32 * 4,
    "Q4_K": 63 * 15,
    "Q5_K": 63 * 31,
    "Q6_K": 128 * 32,
    "IQ4_XS": 32 * 127,
    "IQ1_S": 15 * 1.125,
    "IQ1_M": 15 * 1.125,
    "IQ2_XXS": 31 * 43 / 8,
    "IQ2_XS": 31 * 43 / 8,
    "IQ2_S": 31 * 43 / 8,
    "IQ3_XXS": 31 * 62 / 4,
    "IQ3_S": 31 * 15,
    "NVFP4": 1,
}


def _blocks(array: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """`array` in blocks; in types that the library cannot make, random ones of about its size."""
    if kind not in _LARGEST:
        return quantize(array, gguf.GGMLQuantizationType[kind])
    size = 4 * float(array.std()) / _LARGEST[kind]
    raw = random_blocks(
        kind, array.size // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0], size, seed
    )
    if kind == "NVFP4":  # scales of a few hundredths
        raw[:, :4] = 16 + raw[:, :4] % 16
    return raw.reshape(*array.shape[:-1], -1)


def write_gguf(
    model: Path,
    file: Path,
    kind: str | Callable[[str], str] = "F32",
    parts: int = 1,
    arch: str = "",
    **metadata: Any,
) -> Path:
    """`model` as llama.cpp's converter would write it: matrices in `kind`, if their rows are whole blocks.

    `kind` may be a function of a tensor's name. `arch`: another architecture with the same tensors.
    `metadata`: further keys without the architecture's name, dots as two underscores. Of parts the first.
    """
    config = json.loads((model / "config.json").read_text())
    arch = arch or ARCHITECTURES[config["model_type"]]
    name = file.with_name(f"{file.stem}-00001-of-{parts:05}.gguf") if parts > 1 else file
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=-(-_count(model) // parts) if parts > 1 else 0)
    add_settings(writer, config)
    for key, value in metadata.items():
        add_value(writer, f"{arch}.{key.replace('__', '.')}", value)
    add_tokenizer(writer, model)
    for seed, (tensor, array) in enumerate(named(model, config, arch)):
        add_blocks_or_floats(writer, tensor, array, kind, seed)
    write_all(writer)
    return name


def add_blocks_or_floats(
    writer: gguf.GGUFWriter, tensor: str, array: np.ndarray, kind: str | Callable[[str], str], seed: int
) -> None:
    """Add a tensor: a matrix in `kind`, if its rows are whole blocks, anything else in float32."""
    chosen = kind if isinstance(kind, str) else kind(tensor) if array.ndim > 1 else "F32"
    qtype = gguf.GGMLQuantizationType[chosen]
    whole = array.shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0] == 0
    if array.ndim == 1 or not whole or chosen == "F32":
        writer.add_tensor(tensor, array.astype(np.float32))
    else:
        writer.add_tensor(tensor, _blocks(array.astype(np.float32), chosen, seed), raw_dtype=qtype)


def write_all(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(_inner_size(config))
    writer.add_head_count(config["num_attention_heads"])
    if "conv_L_cache" in config:
        heads = config["num_key_value_heads"]
        writer.add_head_count_kv([heads * (kind == "full_attention") for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    if scale := config.get("attention_multiplier"):
        writer.add_attention_scale(scale)
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if cap := config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(cap)
    if cap := config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size") or config["intermediate_size"]
        )


def _inner_size(config: dict[str, Any]) -> int:
    """That of the tensors, as the converter of LFM2 computes it."""
    inner = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim"):
        multiple = config["block_multiple_of"]
        inner = -(-int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // multiple) * multiple
    return inner


def add_tokenizer(writer: gguf.GGUFWriter, model: Path) -> None:
    raw = json.loads((model / "tokenizer.json").read_text())
    special = {token["content"] for token in raw["added_tokens"]}
    words = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL if w in special else gguf.TokenType.NORMAL for w in words])
    writer.add_token_merges([" ".join(pair) for pair in raw["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])


def named(model: Path, config: dict[str, Any], arch: str) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors by GGUF's names, the experts of a layer in one."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    arrays = load_file(model / "model.safetensors")
    prefix, linears = EXPERT_LINEARS.get(config["model_type"], ("", ()))
    for layer in range(config["num_hidden_layers"]):
        for part in linears:
            inside = f"model.layers.{layer}.{prefix}experts."
            found = [arrays.pop(f"{inside}{i}.{part}.weight", None) for i in range(_experts(config))]
            if found[0] is not None:
                arrays[f"{inside}{part}.weight"] = np.stack(found)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, array in arrays.items():
        place = name if name == "cls.output.weight" else names.get_name(name, (".weight", ".bias"))
        assert place is not None, name
        if arch in {"llama", "smollm3", "granite", "arcee"} and ("q_proj" in name or "k_proj" in name):
            array = side_by_side(array, heads if "q_proj" in name else kv_heads)  # noqa: PLW2901
        if name.endswith("conv.conv.weight"):
            array = array.squeeze(1)  # noqa: PLW2901
        yield place, array + 1 if arch.startswith("gemma") and name.endswith("norm.weight") else array


def side_by_side(array: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter of Llama does: of each head what rotates together becomes neighbors."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _count(model: Path) -> int:
    return len(load_file(model / "model.safetensors"))


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kind = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    kind[type(value)](key, value)
