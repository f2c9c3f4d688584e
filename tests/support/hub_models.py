"""Files of a little model as a hub would hold them, made without torch; its weights are zeroes or noise."""

import json
import random
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.tokenizers_zoo import byte_level, write_text_files

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (q, hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, q),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def safetensors_header(shapes: dict[str, tuple[int, ...]], pad: int = 0) -> tuple[bytes, int]:
    """(length and JSON, bytes of the data that follow). `pad` makes the header longer."""
    entries: dict[str, Any] = {"__metadata__": {"pad": "x" * pad}} if pad else {}
    at = 0
    for name, shape in shapes.items():
        size = prod(shape) * 2
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, at


def _numbers(noise: random.Random, size: int) -> bytes:
    """Of bfloat16, between 0.008 and 0.03 of either sign."""
    data = bytearray(noise.randbytes(size))
    data[1::2] = bytes(byte & 0x80 | 0x3C for byte in data[1::2])
    return bytes(data)


def model_files(seed: int = 0, *, shards: bool = False, **overrides: Any) -> dict[str, bytes]:
    """config, tokenizer, weights, and files that nobody needs."""
    config = CONFIG | overrides
    with TemporaryDirectory() as folder:
        write_text_files(Path(folder), byte_level())
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    files["config.json"] = json.dumps(config).encode()
    files |= {"README.md": b"# read me\n" * 300, "pytorch_model.bin": b"pickle" * 300}
    shapes = tensors_of(config)
    noise = random.Random(seed)
    if not shards:
        header, size = safetensors_header(shapes)
        return files | {"model.safetensors": header + _numbers(noise, size)}
    weight_map = {}
    for number, names in enumerate((list(shapes)[::2], list(shapes)[1::2]), 1):
        name = f"model-0000{number}-of-00002.safetensors"
        header, size = safetensors_header({key: shapes[key] for key in names})
        files[name] = header + _numbers(noise, size)
        weight_map |= dict.fromkeys(names, name)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files
