"""Config of a GGUF file: its metadata as a config.json. Torch-free."""

import re
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from math import isclose, tau
from typing import Any, Final

from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import FETCH_AGAIN, shown
from ..errors import ModelError
from ..model_config.fields import Fields
from ..model_config.registry import named_architecture
from .architectures import GgufArchitecture, architecture_of
from .names import SCORES, parts_of_model
from .reader import FLOATS, GgufFile

LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1 to 3.3, whose files hold only the resulting factors."""


RopeFactors = Mapping[str, Sequence[float]]
"""Frequency divisors of RoPE by the names of their tensors."""
_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


_ANSWERS: Final = ["yes", "no"]
RANKING: Final = {"qwen3", "qwen3vl"}
"""Decoders of which files may be rerankers (Qwen3-Reranker): they have the rows of the answers in place of a
head, or are asked as they are.
"""
_BIAS: Final = re.compile(r"blk\.\d+\.attn_(q|qkv)\.bias")
_ENDLESS: Final = 1e29
"""Divisors from here on stand for dimensions that are not rotated."""


def config_of(gguf: GgufFile, factors: RopeFactors | None = None) -> dict[str, Any]:
    """Build config.json. `factors`: those of `rope_factors`; None where they are not at hand, as of a file on
    the hub. Raises ModelError.
    """
    kind = architecture_of(gguf)
    if "token_embd.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path}: token_embd.weight is missing: the file is incomplete")
    _refuse_other_vectors(gguf, kind)
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": "",  # follows from the class, which `fields` may change
        "dtype": dtype_of(gguf),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": gguf.integer("embedding_length"),
        "intermediate_size": _inner(gguf),
        "num_hidden_layers": count_layers(gguf),
        "max_position_embeddings": gguf.integer("context_length"),
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": any(_BIAS.fullmatch(name) for name in gguf.tensors),
        "mlp_bias": any(re.fullmatch(r"blk\.\d+\.ffn_up\.bias", name) for name in gguf.tensors),
    }
    if kind.activation:
        config["hidden_act"] = kind.activation
    if kind.has_attention:
        config |= _attention(gguf, kind, config["num_hidden_layers"], factors or {})
    config |= kind.fields(gguf, config) | _scores(gguf, config)
    config["model_type"] = named_architecture(Fields(config, str(gguf.path))).model_type
    return config if kind.has_attention else _with_part(config, factors or {})


def _refuse_other_vectors(gguf: GgufFile, kind: GgufArchitecture) -> None:
    """Raise ModelError for files that make vectors in ways that are not computed."""
    if gguf.value("attention.causal") is False and not kind.is_encoder:
        raise ModelError(
            f"{gguf.path}: attention in both directions (attention.causal is false) is not supported of "
            f"{gguf.architecture}, only to tokens before"
        )
    if gguf.architecture != "gemma-embedding" and any(name.startswith("dense_") for name in gguf.tensors):
        raise ModelError(
            f"{gguf.path}: it projects the state of each token (dense_2), as ColBERT does for late "
            "interaction, which is not supported: take a model that makes one vector of a text"
        )


def _with_part(config: dict[str, Any], factors: RopeFactors) -> dict[str, Any]:
    """Set the part of a head that proportional RoPE rotates: the other divisors are beyond all numbers."""
    divisors, ropes = factors.get(_FACTORS[0]), config.get("rope_parameters") or {}
    if divisors and (full := ropes.get("full_attention")):
        full["partial_rotary_factor"] = sum(each < _ENDLESS for each in divisors) / len(divisors)
    return config


def _scores(gguf: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return what a decoder with rows of scores is called. Raises ModelError for others than a reranker's."""
    entry = gguf.tensors.get(SCORES)
    if entry is None or gguf.architecture not in RANKING:
        return {}
    labels = gguf.value("classifier.output_labels", _ANSWERS if entry.shape[:-1] == (2,) else ["score"])
    rows, is_known = len(labels) if isinstance(labels, list) else 0, labels in (_ANSWERS, _ANSWERS[::-1])
    if not 1 <= rows <= 2 or (rows == 2 and not is_known):
        raise ModelError(
            f"{gguf.path}: {gguf.architecture}.classifier.output_labels must be yes and no, or one label"
        )
    shape = entry.shape if len(entry.shape) > 1 else (1, *entry.shape)  # llama-quantize leaves the 1 out
    if shape != (wanted := (rows, config["hidden_size"])):
        raise ModelError(
            f"{entry.file}: tensor {shown(SCORES)} has shape {list(entry.shape)}, "
            f"the file's metadata require {list(wanted)}"
        )
    name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    return {"architectures": [name], "num_labels": rows, "id2label": dict(enumerate(labels))}


def count_layers(gguf: GgufFile) -> int:
    """Return the number of layers without those behind them, which predict several tokens (MTP)."""
    layers = gguf.integer("block_count")
    return max(1, layers - gguf.count("nextn_predict_layers"))


def _inner(gguf: GgufFile) -> int | None:
    """Return the largest intermediate size of layers; None for a file that names none."""
    rows = gguf.value("feed_forward_length")
    return max(gguf.by_layer("feed_forward_length", gguf.integer("block_count"))) or None if rows else None


def _attention(gguf: GgufFile, kind: GgufArchitecture, layers: int, factors: RopeFactors) -> dict[str, Any]:
    numbers = set(gguf.by_layer("attention.head_count", layers)) - {0}
    heads = numbers.pop() if len(numbers) == 1 else gguf.integer("attention.head_count")
    kv_heads = set(gguf.by_layer("attention.head_count_kv", layers, heads)) - {0}
    if len(kv_heads) != 1:
        raise ModelError(f"{gguf.path}: {gguf.architecture}.attention.head_count_kv differs between layers")
    head_dim = _head_dim(gguf, kind, heads)
    rope = rope_of(gguf, factors, head_dim)
    if kind.is_partial:
        rope["partial_rotary_factor"] = gguf.integer("rope.dimension_count", head_dim) / head_dim
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads.pop(),
        "head_dim": head_dim,
        "rope_parameters": rope,
    }


def _head_dim(gguf: GgufFile, kind: GgufArchitecture, heads: int) -> int:
    keys = gguf.integer("attention.key_length", gguf.integer("embedding_length") // heads)
    alike = [] if kind.is_partial else ["rope.dimension_count"]
    alike = [] if gguf.value("attention.kv_lora_rank") else ["attention.value_length", *alike]
    if any(gguf.value(each, keys) != keys for each in alike):
        raise ModelError(
            f"{gguf.path}: values of another width than keys, and partial RoPE, are not supported"
        )
    return keys


def rope_of(gguf: GgufFile, factors: RopeFactors, head_dim: int) -> dict[str, Any]:
    theta = gguf.number("rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if (divisors := factors.get(_FACTORS[0])) is not None:
        return rope | _of_factors(divisors, theta, head_dim, gguf.integer("context_length"))
    kind = gguf.value("rope.scaling.type", "none")
    if kind == "none" and (factor := gguf.number("rope.scale_linear", 1.0)) > 1:  # in files of 2023
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "none":
        return rope
    if kind == "longrope" and gguf.architecture == "phi3":
        return rope | _long_rope(gguf, factors)
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{gguf.path}: rope scaling {kind!r} is not supported, only linear and yarn")
    rope |= {"rope_type": kind, "factor": gguf.value("rope.scaling.factor", 1.0)}
    betas = {each: gguf.value(f"rope.scaling.yarn_{each}") for each in ("beta_fast", "beta_slow")}
    betas["original_max_position_embeddings"] = gguf.value("rope.scaling.original_context_length")
    return rope | {each: value for each, value in betas.items() if value is not None}


def _long_rope(gguf: GgufFile, factors: RopeFactors) -> dict[str, Any]:
    """Return LongRoPE of the file's two tensors; nothing where they are not at hand."""
    long, short = (factors.get(name) for name in _FACTORS[1:])
    if long is None or short is None:
        return {}
    scale = gguf.value("rope.scaling.attn_factor")
    return {
        "rope_type": "longrope",
        "long_factor": list(long),
        "short_factor": list(short),
        **({} if scale is None else {"attention_factor": gguf.number("rope.scaling.attn_factor", 1.0)}),
    }


def rope_factors(gguf: GgufFile) -> dict[str, list[float]]:
    """Read the tensors with frequency divisors that the file has. Raises ModelError."""
    return {name: _read_factors(gguf, name) for name in _FACTORS if name in gguf.tensors}


def _read_factors(gguf: GgufFile, name: str) -> list[float]:
    entry = gguf.tensors[name]
    if entry.dtype != "F32" or len(entry.shape) != 1:
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is {entry.dtype}, F32 is needed")
    try:
        with open_regular(entry.file) as stream:
            stream.seek(entry.offset)
            raw = stream.read(entry.nbytes)
    except OSError as error:
        raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None
    if len(raw) != entry.nbytes:
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is cut short; {FETCH_AGAIN}")
    return list(struct.unpack(f"<{entry.shape[0]}f", raw))


def _of_factors(factors: Sequence[float], theta: float, head_dim: int, context: int) -> dict[str, Any]:
    """Map frequency divisors to RoPE scaling: `llama3` where they match its formula, else `longrope`."""
    factor = max(factors)
    expected = llama3_factors(factor, theta, head_dim)
    if len(factors) == len(expected) and all(map(partial(isclose, rel_tol=1e-4), factors, expected)):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    every = {"short_factor": list(factors), "long_factor": list(factors), "attention_factor": 1.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": context, "factor": 1.0, **every}


def llama3_factors(factor: float, theta: float, head_dim: int) -> list[float]:
    """Return Llama 3.1's frequency divisors: `factor` for slow ones, 1 for fast ones, a ramp between."""
    low, high, original = LLAMA3.values()
    turns = [original * theta ** (-i / head_dim) / tau for i in range(0, head_dim, 2)]
    smooth = [min(1.0, max(0.0, (each - low) / (high - low))) for each in turns]
    return [1 / ((1 - each) / factor + each) for each in smooth]


def dtype_of(gguf: GgufFile) -> str:
    """Return the dtype of the new checkpoint: float32 for a file of float32 matrices only, else bfloat16."""
    tensors = parts_of_model(gguf.tensors).values()
    matrices = {entry.dtype for entry in tensors if len(entry.shape) > 1}
    return "float32" if matrices == {"F32"} else "bfloat16"


def name_of(gguf: GgufFile) -> str:
    """Return the file's name without the part number of a split file; for a nameless blob, the name in its
    metadata.
    """
    if gguf.path.suffix == ".gguf":
        return re.sub(r"-\d{5}-of-\d{5}$", "", gguf.path.stem)
    name = gguf.metadata.get("general.name")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") if isinstance(name, str) else ""
    return plain or f"{gguf.architecture}-from-gguf"


def is_quantized(gguf: GgufFile) -> bool:
    return any(entry.dtype not in FLOATS for entry in gguf.tensors.values())


def generation_of(gguf: GgufFile) -> dict[str, Any]:
    """Build generation_config.json: the end-of-sequence ids."""
    ids = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = sorted({each for each in ids if isinstance(each, int)})
    return {"eos_token_id": ends} if ends else {}
