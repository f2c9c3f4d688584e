"""Random weights in a real shape, for speed only: `python -P tests/bench/random_model.py --out DIR`.

With `--draft LAYERS` also a draft model: the first layers of a target whose others change little, `--damping`
times as much as they would, so that both often agree.

The shape with an MTP layer predicts the successor of the last token in a fixed order, and so does its MTP
layer; `--damping` says how much the layers of both add to that, so how often they disagree.

With `--agreement SHARE` a target and a draft of 0.1 billion weights (hidden 512, the same vocabulary) whose
next tokens agree that often. Greedy answers of the target go through all ids in one cycle: a row of the head
is the embedding of the id before it, and layers add little to it. The draft has the same cycle for a share of
the ids and another one for the rest. Nothing is left out: each step reads all weights of its shape.

With `--skew FACTOR` router rows of the first eighth of the experts are so much larger: they are chosen more.

With `--published STYLE` a checkpoint as AutoAWQ, AutoGPTQ or another tool would publish it (`awq-g128`,
`gptq-4`). The folder appears when it is whole: half of it would pass for an unquantized model.

Every id decodes to some text, so that streams carry a piece a token: 256 bytes, `ab`, then made-up words.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.format_styles import STYLES
from support.published_formats import publish
from support.tiny_models import CHATML, SPECIAL, tensor_shapes

QWEN35_SIZES = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
}
"""Sizes of Qwen3.5-0.8B."""
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
    # A mixture that several engines can hold beside each other: 0.5 billion weights.
    "qwen3-moe-small": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "moe_intermediate_size": 384,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
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
    # Qwen3.5 0.8B with an output head of its own, which needs another table than the embedding here.
    "qwen3.5-0.8b-mtp": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **QWEN35_SIZES,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 2,
    },
}


SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""Changes that make a draft of Qwen3-0.6B."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--draft", type=int, metavar="LAYERS")
    parser.add_argument("--damping", type=float, default=0.1)
    parser.add_argument("--agreement", type=float, metavar="SHARE")
    parser.add_argument("--skew", type=float, metavar="FACTOR", default=1.0)
    parser.add_argument("--published", choices=STYLES, metavar="STYLE")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    if options.published:
        folder = options.out / f"{options.shape}-{options.published}"
        unfinished = write_model(folder.with_name(f"unfinished-{folder.name}"), config)
        style = STYLES[options.published]
        publish(unfinished, style.entry, style.store, others=style.others)
        unfinished.rename(folder)
        return
    if "mtp_num_hidden_layers" in config:
        write_mtp_model(options.out / options.shape, config, options.damping)
        return
    if options.agreement is not None:
        write_cycle_pair(options.out, config, options.agreement)
        return
    if options.draft is None:
        write_model(options.out / options.shape, config, skew=options.skew)
        return
    write_model(options.out / f"{options.shape}-target", config, options.draft, options.damping)
    write_model(options.out / f"{options.shape}-draft", config | {"num_hidden_layers": options.draft})


def write_model(
    folder: Path, config: dict, whole: int | None = None, damping: float = 1.0, skew: float = 1.0
) -> Path:
    """Write a model. Layers from `whole` on add `damping` times as much to the residual."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1234)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16)
        weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        if name.endswith("mlp.gate.weight"):
            weight[: len(weight) // 8] *= skew
        layer = name.split(".")[2] if name.count(".") > 1 else ""
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


def write_mtp_model(folder: Path, config: dict, damping: float) -> Path:
    """Write a hybrid with an MTP layer."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1234)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    weights = {name: draw(name, shape, generator, damping) for name, shape in hybrid_shapes(config).items()}
    table = weights["model.embed_tokens.weight"]
    order = torch.randperm(vocab, generator=generator)
    head = torch.empty_like(table)
    head[order.roll(-1)] = table[order]
    weights["lm_head.weight"] = head
    weights["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, vocab)
    return folder


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator, damping: float) -> torch.Tensor:
    if len(shape) == 1:  # norms that multiply by 1 + w, and the gates of recurrent layers
        return torch.zeros(shape) if "linear_attn" not in name else torch.full(shape, 0.5)
    weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
    adds = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
    return weight * damping if adds else weight


def hybrid_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a Qwen3.5 with an MTP layer."""
    hidden, inner, width = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    value_heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    keys, values = key_heads * config["linear_key_head_dim"], value_heads * config["linear_value_head_dim"]
    full = {
        "q_proj.weight": (2 * heads * width, hidden),
        "k_proj.weight": (kv_heads * width, hidden),
        "v_proj.weight": (kv_heads * width, hidden),
        "o_proj.weight": (hidden, heads * width),
        "q_norm.weight": (width,),
        "k_norm.weight": (width,),
    }
    linear = {
        "in_proj_qkv.weight": (2 * keys + values, hidden),
        "in_proj_z.weight": (values, hidden),
        "in_proj_b.weight": (value_heads, hidden),
        "in_proj_a.weight": (value_heads, hidden),
        "conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }
    mlp = {"gate_proj.weight": (inner, hidden), "up_proj.weight": (inner, hidden)}
    mlp["down_proj.weight"] = (hidden, inner)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    kinds = {f"model.layers.{number}": kind for number, kind in enumerate(config["layer_types"])}
    for layer, kind in (kinds | {"mtp.layers.0": "full_attention"}).items():
        mixer, parts = ("self_attn", full) if kind == "full_attention" else ("linear_attn", linear)
        shapes |= {f"{layer}.{mixer}.{name}": shape for name, shape in parts.items()}
        shapes |= {f"{layer}.mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {
            f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
    norms = ("model.norm", "mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding")
    return shapes | {f"{name}.weight": (hidden,) for name in norms}


def write_cycle_pair(out: Path, config: dict, agreement: float) -> None:
    """Write `target` and `draft`, whose greedy tokens agree after so large a share of all ids."""
    size = config["vocab_size"]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(7))
    follower = torch.empty(size, dtype=torch.long)
    follower[order] = order.roll(-1)
    other = order[torch.rand(size, generator=torch.Generator().manual_seed(8)) >= agreement]
    guess = follower.clone()
    guess[other] = follower[other.roll(1)]
    for name, changes, next_id in (("target", {}, follower), ("draft", SMALL, guess)):
        shape = config | changes | {"tie_word_embeddings": False}
        folder = write_model(out / name, shape, 0, 0.01)
        weights = load_file(folder / "model.safetensors")
        embedding = weights["model.embed_tokens.weight"].normal_(generator=torch.Generator().manual_seed(9))
        weights["lm_head.weight"][next_id] = embedding * 0.05
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, size: int) -> None:
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    words += [f"Ġw{number}" for number in range(size - len(words))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))  # llama.cpp wants one
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML})
    )


if __name__ == "__main__":
    main()
