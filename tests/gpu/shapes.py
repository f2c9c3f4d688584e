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
    "30B-A3B": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def parameters(shape: dict[str, Any]) -> int:
    return tables(shape) + linears(shape, shape.get("num_experts", 1))


def tables(shape: dict[str, Any]) -> int:
    return int(shape["vocab_size"] * shape["hidden_size"] * (1 if shape["tie_word_embeddings"] else 2))


def linears(shape: dict[str, Any], experts: float) -> int:
    """Weights of all layers with so many of the experts; a dense model is one expert."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    inner = shape.get("moe_intermediate_size", shape["intermediate_size"])
    router = hidden * shape.get("num_experts", 0)
    layer = hidden * (2 * heads + 2 * kv) + router + experts * 3 * hidden * inner
    return int(shape["num_hidden_layers"] * layer)


def prompt_operations(shape: dict[str, Any], tokens: int) -> float:
    q, layers = shape["num_attention_heads"] * shape["head_dim"], shape["num_hidden_layers"]
    return tokens * (2 * linears(shape, shape.get("num_experts_per_tok", 1)) + 2 * layers * q * tokens)


def experts_read(shape: dict[str, Any], batch: int) -> float:
    """How many of a layer's experts a step of so many rows needs, if every row takes any."""
    count, each = shape.get("num_experts", 1), shape.get("num_experts_per_tok", 1)
    return float(count * (1 - (1 - each / count) ** batch))


def step_floor(info: Any, shape: dict[str, Any], peaks: dict[str, float], batch: int, context: int) -> float:
    """Seconds: keys and values are read, and all weights that some row needs but an input table that is no
    head; with many rows their products take longer.
    """
    table = 0 if shape["tie_word_embeddings"] else shape["vocab_size"] * shape["hidden_size"]
    head = shape["vocab_size"] * shape["hidden_size"]
    rate = peaks["bf16"]
    if info.quant in EIGHT_BITS:
        rate = peaks.get("fp8", rate)
    needed = linears(shape, experts_read(shape, batch)) / linears(shape, shape.get("num_experts", 1))
    read = ((info.weights_bytes - 2 * tables(shape)) * needed + 2 * head) / peaks["bytes"]
    active = linears(shape, shape.get("num_experts_per_tok", 1)) + tables(shape) - table
    return max(read, 2 * batch * active / rate) + batch * context * info.kv_bytes_per_token / peaks["bytes"]
