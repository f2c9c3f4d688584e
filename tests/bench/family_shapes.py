"""GGUF files with random weights in the shapes of newer families, cut so that a small machine holds them.

    python -P tests/bench/family_shapes.py --out DIR [--shape NAME ...]

Layers and experts have their published sizes. There are fewer of them, and fewer ids, where the whole
would not fit; as many experts are chosen. Matrices are Q8_0, experts of gpt-oss MXFP4. llmbox and llama.cpp
read the same file: `peers.py --model DIR/NAME.gguf`. Needs transformers, and twice the weights in float32.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.random_model import QWEN35_SIZES, write_tokenizer
from support.gguf_families import make_source, write_family
from support.gguf_models import write_gguf
from support.tiny_models import make_tiny_model

FEW_IDS: dict[str, Any] = {"vocab_size": 32768, "max_position_embeddings": 32768}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen3.5-0.8B, whole.
    "qwen3.5-0.8b": (
        "qwen35",
        {
            **QWEN35_SIZES,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    # Gemma 4 E2B: 15 of 35 layers, of which 10 share keys and values.
    "gemma4-e2b-cut": (
        "gemma4",
        FEW_IDS
        | {
            "vocab_size_per_layer_input": 32768,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 15,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 10,
            "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 3,
            "sliding_window": 512,
        },
    ),
    # gpt-oss-20b: 3 of 24 layers, 10 of 32 experts.
    "gpt-oss-20b-cut": (
        "gpt-oss",
        FEW_IDS
        | {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 3,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 10,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_parameters": {
                "rope_theta": 150000.0,
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
    ),
    # Qwen3-30B-A3B: 3 of 48 layers, 64 of 128 experts.
    "qwen3-30b-a3b-cut": (
        "qwen3moe",
        FEW_IDS
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 3,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rope_theta": 1000000.0,
        },
    ),
    # GLM-4.7-Flash: 3 of 47 layers, of which the first is dense, 40 of 64 experts.
    "glm-4.7-flash-cut": (
        "glm4-flash",
        FEW_IDS
        | {
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 3,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "n_routed_experts": 40,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "head_dim": 64,
        },
    ),
}
METADATA: dict[str, dict[str, Any]] = {"qwen35": {"rope__dimension_sections": [11, 11, 10, 0]}}
"""Further keys that llama.cpp wants, by family."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.shape or SHAPES:
        if not (file := options.out / f"{name}.gguf").exists():
            write_shape(file, *SHAPES[name])


def write_shape(file: Path, family: str, sizes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        source, unfinished = Path(folder) / "source", Path(folder) / file.name
        if family == "qwen3moe":
            make_tiny_model(source, arch="qwen3_moe", **sizes)
        else:
            make_source(source, family, **sizes)
        write_tokenizer(source, sizes["vocab_size"])
        if family == "qwen3moe":
            write_gguf(source, unfinished, kind_of)
        elif family == "gpt-oss":
            write_family(source, unfinished, family, lambda name: kind_of(name, "MXFP4"))
        else:
            write_family(source, unfinished, family, kind_of, **METADATA.get(family, {}))
        unfinished.rename(file)


def kind_of(tensor: str, experts: str = "Q8_0") -> str:
    """Return the type of a matrix, as llama.cpp's quantizer has it: routers and biases stay as they are."""
    if "ffn_gate_inp" in tensor or tensor.endswith(".bias"):
        return "F32"
    return experts if "_exps" in tensor else "Q8_0"


if __name__ == "__main__":
    main()
