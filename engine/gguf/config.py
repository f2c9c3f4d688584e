"""Config of a GGUF file: its metadata as a config.json, and the supported architectures. Torch-free."""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isclose, tau
from typing import Any, Final

from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import FETCH_AGAIN, shown
from ..errors import ModelError, UnsupportedArchitecture
from ..model_config.fields import is_number
from .reader import FLOATS, GgufFile

_OUTSIDE: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}
LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
SANDWICH: Final = LAYER | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
"""Names in layers with sandwich norms."""
SHORT_CONV: Final = {
    "operator_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
"""Names in layers of LFM2."""
_EXPERT: Final = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OF_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_OUTSIDE_LAYERS = re.compile(r"(.+)\.(weight|bias)")
NOT_NEEDED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)
"""Tensors that are ignored: config.json has their content."""


@dataclass(frozen=True, slots=True)
class GgufTensorPlace:
    """Tensor in a GGUF file. `expert`: index in a stacked tensor."""

    name: str
    expert: int | None = None


def place_of(name: str, of_layer: Mapping[str, str]) -> GgufTensorPlace:
    """Look up a checkpoint's tensor. `of_layer`: names of the architecture's layers. Raises ModelError."""
    if found := _IN_LAYER.fullmatch(name):
        layer, inside, kind = found.groups()
        if expert := _OF_EXPERT.fullmatch(inside):
            number, part = expert.groups()
            if part in _EXPERT:
                return GgufTensorPlace(f"blk.{layer}.{_EXPERT[part]}.{kind}", int(number))
        elif inside in of_layer:
            return GgufTensorPlace(f"blk.{layer}.{of_layer[inside]}.{kind}")
    elif (found := _OUTSIDE_LAYERS.fullmatch(name)) and found[1] in _OUTSIDE:
        return GgufTensorPlace(f"{_OUTSIDE[found[1]]}.{found[2]}")
    raise ModelError(f"where a GGUF file has {name} is not known: this architecture cannot be read from one")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """Differences of one architecture between GGUF and a checkpoint."""

    name: str
    """Class name in `architectures` of config.json."""
    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    """Names of a layer's tensors: {in a checkpoint: in GGUF}."""
    has_pairs: bool = False
    """RoPE pairs of query and key rows are interleaved, not half a head apart."""
    norms_hold_one: bool = False
    """Norms are stored as 1 + w."""
    activation: str = "silu"
    """`hidden_act` of config.json, which a file does not say."""


ARCHITECTURES: Final = {
    "llama": GgufArchitecture(name="LlamaForCausalLM", model_type="llama", has_pairs=True),
    "qwen2": GgufArchitecture(name="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GgufArchitecture(name="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3moe": GgufArchitecture(name="Qwen3MoeForCausalLM", model_type="qwen3_moe"),
    "qwen2vl": GgufArchitecture(name="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3vl": GgufArchitecture(name="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen3vlmoe": GgufArchitecture(name="Qwen3MoeForCausalLM", model_type="qwen3_moe"),
    "arcee": GgufArchitecture(
        name="ArceeForCausalLM", model_type="arcee", has_pairs=True, activation="relu2"
    ),
    "granite": GgufArchitecture(name="GraniteForCausalLM", model_type="granite", has_pairs=True),
    "smollm3": GgufArchitecture(name="SmolLM3ForCausalLM", model_type="smollm3", has_pairs=True),
    "gemma": GgufArchitecture(name="GemmaForCausalLM", model_type="gemma", norms_hold_one=True),
    "gemma2": GgufArchitecture(
        name="Gemma2ForCausalLM", model_type="gemma2", layer=SANDWICH, norms_hold_one=True
    ),
    "gemma3": GgufArchitecture(
        name="Gemma3ForCausalLM", model_type="gemma3_text", layer=SANDWICH, norms_hold_one=True
    ),
    "lfm2": GgufArchitecture(name="Lfm2ForCausalLM", model_type="lfm2", layer=SHORT_CONV),
}
"""Architectures by GGUF's name. Mistral and Mixtral are called llama. Texts of a Qwen-VL are those of a Qwen:
its file holds the language part, and positions in pictures are not used.
"""


LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE scaling of Llama 3.1 to 3.3, whose files hold only the resulting factors."""


def config_of(gguf: GgufFile, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """Build config.json. `rope_factors`: frequency divisors of rope_freqs.weight. Raises ModelError."""
    kind = architecture_of(gguf)
    heads = _integer(gguf, "attention.head_count")
    head_dim = _head_dim(gguf, heads)
    if "token_embd.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path}: token_embd.weight is missing: it is no whole model")
    config: dict[str, Any] = {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "dtype": dtype_of(gguf),
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": _integer(gguf, "embedding_length"),
        "intermediate_size": gguf.value("feed_forward_length") and _integer(gguf, "feed_forward_length"),
        "num_hidden_layers": _integer(gguf, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(gguf, heads),
        "head_dim": head_dim,
        "max_position_embeddings": _integer(gguf, "context_length"),
        "rms_norm_eps": _number(gguf, "attention.layer_norm_rms_epsilon", 1e-5),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "rope_parameters": rope_of(gguf, rope_factors, head_dim),
    }
    if kind.norms_hold_one:
        return config | _gemma(gguf, config)
    if gguf.architecture == "lfm2":
        return config | _lfm2(gguf, config)
    fields = {"hidden_act": kind.activation} | _granite(gguf) | _window(gguf)
    return config | fields | _experts(gguf, config)


def architecture_of(gguf: GgufFile) -> GgufArchitecture:
    """Look up the file's architecture. Raises UnsupportedArchitecture."""
    if gguf.architecture == "clip":
        raise UnsupportedArchitecture(
            f"{gguf.path} is a projector (mmproj), the part of a model that reads pictures: name the file of "
            "the language model, and leave this one beside it"
        )
    if gguf.architecture not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{gguf.path}: architecture {gguf.architecture!r} cannot be read from GGUF; readable: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[gguf.architecture]


def _gemma(gguf: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Add values that Gemma files omit: equal for all models of a generation except its largest."""
    largest = {"gemma2": 46, "gemma3": 62}.get(gguf.architecture) == config["num_hidden_layers"]
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    theta = 1e6 if gguf.architecture == "gemma3" else 1e4
    rope = config.pop("rope_parameters")
    fields: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.value("attention.sliding_window"),
        "attn_logit_softcapping": gguf.value("attn_logit_softcapping"),
        "final_logit_softcapping": gguf.value("final_logit_softcapping"),
        "rope_theta": _number(gguf, "rope.freq_base", theta),
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }
    return fields


def _granite(gguf: GgufFile) -> dict[str, Any]:
    """Return the multipliers of a Granite."""
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    is_granite = gguf.architecture == "granite"
    return {name: _number(gguf, key, 1.0) for name, key in names.items()} if is_granite else {}


def _lfm2(gguf: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an LFM2, whose layers without heads for keys are short convolutions."""
    heads = gguf.value("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != config["num_hidden_layers"]:
        raise ModelError(f"{gguf.path}: lfm2.attention.head_count_kv must have a number for each layer")
    return {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": _integer(gguf, "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in gguf.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _kv_heads(gguf: GgufFile, heads: int) -> int:
    """Return the number in layers that have some."""
    counts = gguf.value("attention.head_count_kv", heads)
    if gguf.architecture != "lfm2" or not isinstance(counts, list):
        return _integer(gguf, "attention.head_count_kv", heads)
    some = {count for count in counts if count != 0}
    found = some.pop() if len(some) == 1 else None
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelError(f"{gguf.path}: lfm2.attention.head_count_kv must be one positive number, or 0")
    return found


def _head_dim(gguf: GgufFile, heads: int) -> int:
    keys = _integer(gguf, "attention.key_length", _integer(gguf, "embedding_length") // heads)
    if any(gguf.value(each, keys) != keys for each in ("attention.value_length", "rope.dimension_count")):
        raise ModelError(
            f"{gguf.path}: values of another width than keys, or heads rotated in part, cannot be read"
        )
    return keys


def _window(gguf: GgufFile) -> dict[str, Any]:
    window = gguf.value("attention.sliding_window")
    if not window:
        return {"sliding_window": None}
    if gguf.architecture != "llama":
        raise ModelError(f"{gguf.path}: which layers of {gguf.architecture} slide is not said in GGUF")
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _experts(gguf: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    count = gguf.value("expert_count")
    if not count:
        return {}
    if "blk.0.ffn_gate_exps.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path}: it has each expert apart, as files before 2024 do; take a newer one")
    if gguf.architecture == "llama":
        mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        return mixtral | {
            "num_local_experts": count,
            "num_experts_per_tok": _integer(gguf, "expert_used_count"),
        }
    inner = _integer(gguf, "expert_feed_forward_length")
    return {
        "num_experts": count,
        "num_experts_per_tok": _integer(gguf, "expert_used_count"),
        "moe_intermediate_size": inner,
        "intermediate_size": config["intermediate_size"] or inner,
        "norm_topk_prob": True,  # llama.cpp always does
    }


def rope_of(gguf: GgufFile, factors: Sequence[float] | None, head_dim: int) -> dict[str, Any]:
    theta = _number(gguf, "rope.freq_base", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if factors is not None:
        return rope | _of_factors(factors, theta, head_dim, _integer(gguf, "context_length"))
    kind = gguf.value("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{gguf.path}: rope scaling {kind!r} cannot be read, only linear and yarn")
    rope |= {"rope_type": kind, "factor": gguf.value("rope.scaling.factor", 1.0)}
    original = gguf.value("rope.scaling.original_context_length")
    return rope if original is None else rope | {"original_max_position_embeddings": original}


def rope_factors(gguf: GgufFile) -> list[float] | None:
    """Read the frequency divisors of the tensor rope_freqs.weight, or None. Raises ModelError."""
    entry = gguf.tensors.get("rope_freqs.weight")
    if entry is None:
        return None
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
    matrices = {entry.dtype for entry in gguf.tensors.values() if len(entry.shape) > 1}
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


def _integer(gguf: GgufFile, key: str, default: int | None = None) -> int:
    """Read a positive integer; a list with one value per layer must be uniform. Raises ModelError."""
    value = gguf.value(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"{gguf.path}: {gguf.architecture}.{key} is {str(value)[:80]}, a positive number for all layers "
            f"is needed; {FETCH_AGAIN}"
        )
    return value


def _number(gguf: GgufFile, key: str, default: float) -> float:
    """Read a float32 with its shortest decimal form: 1e-06, not 9.999999974752427e-07. Raises ModelError."""
    value = gguf.value(key, default)
    if not is_number(value):
        raise ModelError(f"{gguf.path}: {gguf.architecture}.{key} is no number; {FETCH_AGAIN}")
    return float(f"{value:.7g}")
