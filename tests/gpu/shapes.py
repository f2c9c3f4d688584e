"""Shapes of the models that are measured, and what follows from them."""

from typing import Any

EIGHT_BITS = {"fp8", "fp8-block", "w8a8"}
"""Formats whose products are of 8-bit numbers."""

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def parameters(shape: dict[str, Any]) -> int:
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * heads + 2 * kv) + 3 * hidden * shape["intermediate_size"]
    tables = shape["vocab_size"] * hidden * (1 if shape["tie_word_embeddings"] else 2)
    return tables + shape["num_hidden_layers"] * layer


def prompt_operations(shape: dict[str, Any], tokens: int) -> float:
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    q, kv = shape["num_attention_heads"] * shape["head_dim"], shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * q + 2 * kv) + 3 * hidden * shape["intermediate_size"]
    return layers * tokens * (2 * layer + 2 * q * tokens)


def step_floor(info: Any, shape: dict[str, Any], peaks: dict[str, float], batch: int, context: int) -> float:
    """Seconds: keys and values are read, and all weights but an input table that is no head; with many rows
    their products take longer.
    """
    table = 0 if shape["tie_word_embeddings"] else shape["vocab_size"] * shape["hidden_size"]
    rate = peaks["bf16"]
    if info.quant in EIGHT_BITS:
        rate = peaks.get("fp8", rate)
    read = (info.weights_bytes - 2 * table) / peaks["bytes"]
    computed = 2 * batch * (parameters(shape) - table) / rate
    return max(read, computed) + batch * context * info.kv_bytes_per_token / peaks["bytes"]
