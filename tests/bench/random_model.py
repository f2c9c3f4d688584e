"""Random weights in a real shape, for speed only: `python -P tests/bench/random_model.py --out DIR`.

With `--draft LAYERS` also a draft model: the first layers of a target whose others change little, `--damping`
times as much as they would, so that both often agree.

Every id decodes to some text, so that streams carry a piece a token: 256 bytes, then made-up words.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.tiny_models import CHATML, SPECIAL, tensor_shapes

SHAPES = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    },
    # Layers of Qwen3-30B-A3B, an eighth of them.
    "qwen3-moe-6-layers": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--draft", type=int, metavar="LAYERS")
    parser.add_argument("--damping", type=float, default=0.1)
    options = parser.parse_args()
    config = SHAPES[options.shape]
    if options.draft is None:
        write_model(options.out / options.shape, config)
        return
    write_model(options.out / f"{options.shape}-target", config, options.draft, options.damping)
    write_model(options.out / f"{options.shape}-draft", config | {"num_hidden_layers": options.draft})


def write_model(folder: Path, config: dict, whole: int | None = None, damping: float = 1.0) -> Path:
    """Write a model. Layers from `whole` on add `damping` times as much to the residual."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1234)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        layer = name.split(".")[2]
        is_late = whole is not None and layer.isdigit() and int(layer) >= whole
        return (
            weight * damping if is_late and name.endswith(("o_proj.weight", "down_proj.weight")) else weight
        )

    save_file(
        {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_tokenizer(folder: Path, size: int) -> None:
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġw{number}" for number in range(size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML})
    )


if __name__ == "__main__":
    main()
