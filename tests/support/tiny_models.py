"""Tiny random models in Hugging Face format: one for each architecture and RoPE variant.

A model is a directory with config.json, model.safetensors (or shards), generation_config.json and,
unless refused, a byte-level BPE tokenizer with a ChatML template. Written without transformers: fast.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from support.families import FAMILIES, SIBLINGS, make_family
from support.gemma_models import GEMMA, gemma_fields, gemma_norms

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
}
EXPERT_LINEARS = {
    "qwen3_moe": ("mlp.", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.", ("w1", "w3", "w2")),
}
"""Where they are in a layer, and what gate, up and down are called."""
ORIGINAL_CONTEXT = 32
HEAD_DIM = 16
ROPE_VARIANTS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
}
ROPES = {arch: tuple(ROPE_VARIANTS) for arch in ARCHITECTURES} | {"phi3": ("default", "longrope")}
"""The variants that an architecture knows."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 320
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tiny_config(arch: str = "qwen3", rope: str = "default", **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model, in the style of older transformers (`rope_theta` + `rope_scaling`)."""
    config: dict[str, Any] = {
        "architectures": [(ARCHITECTURES | GEMMA)[arch]],
        "model_type": arch,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rope_scaling": ROPE_VARIANTS[rope],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }
    if rope == "dynamic":
        config["max_position_embeddings"] = ORIGINAL_CONTEXT
    if arch in {"mistral", "phi3", "smollm3"}:
        config["sliding_window"] = None
    if arch == "olmo3":  # other thetas without rope_parameters are those of full attention alone
        config |= {"sliding_window": 20, "rope_theta": 500000.0}
        config["layer_types"] = ["sliding_attention", "full_attention"]
    if arch == "granite":
        config |= {"embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3}
        config["logits_scaling"] = 3.0
    if arch == "smollm3":
        config["no_rope_layers"] = [1, 0]
    if arch == "phi3" and rope == "longrope":  # its context is the one after scaling
        config["original_max_position_embeddings"] = ORIGINAL_CONTEXT
    if arch == "qwen2":
        config |= {"use_sliding_window": False, "max_window_layers": 2, "sliding_window": None}
    if arch == "qwen3_moe":
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        }
        config |= {"use_sliding_window": False, "sliding_window": None}
    if arch == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    if arch in GEMMA:
        config |= gemma_fields(arch)
    return config | overrides


def expert_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's router and experts; none where the layer has an MLP."""
    arch, hidden = config["model_type"], config["hidden_size"]
    sparse = arch == "mixtral" or (
        arch == "qwen3_moe"
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
        and layer not in config.get("mlp_only_layers", [])
    )
    if not sparse:
        return {}
    prefix, (gate, up, down) = EXPERT_LINEARS[arch]
    count = config["num_local_experts" if arch == "mixtral" else "num_experts"]
    inner = config["intermediate_size" if arch == "mixtral" else "moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (count, hidden)}
    for expert in range(count):
        name = f"{prefix}experts.{expert}."
        shapes |= {f"{name}{part}.weight": (inner, hidden) for part in (gate, up)}
        shapes[f"{name}{down}.weight"] = (hidden, inner)
    return shapes


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, by its Hugging Face name."""
    arch, hidden, ffn, vocab = (
        config[k] for k in ("model_type", "hidden_size", "intermediate_size", "vocab_size")
    )
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    qkv_bias = arch == "qwen2" or config.get("attention_bias", False)
    o_bias = arch != "qwen2" and config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        before = "post_feedforward_layernorm" if arch in {"olmo2", "olmo3"} else "input_layernorm"
        shapes[p + before + ".weight"] = shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        linears = {
            "self_attn.q_proj": (q, hidden, qkv_bias),
            "self_attn.k_proj": (kv, hidden, qkv_bias),
            "self_attn.v_proj": (kv, hidden, qkv_bias),
            "self_attn.o_proj": (hidden, q, o_bias),
        }
        experts = expert_shapes(config, i)
        shapes |= {p + name: shape for name, shape in experts.items()}
        mlp = {
            "mlp.gate_proj": (ffn, hidden, config.get("mlp_bias", False)),
            "mlp.up_proj": (ffn, hidden, config.get("mlp_bias", False)),
            "mlp.down_proj": (hidden, ffn, config.get("mlp_bias", False)),
        }
        if arch == "phi3":
            linears = {"self_attn.qkv_proj": (q + 2 * kv, hidden, False)} | {
                "self_attn.o_proj": (hidden, q, False)
            }
            mlp = {"mlp.gate_up_proj": (2 * ffn, hidden, False), "mlp.down_proj": (hidden, ffn, False)}
        for name, (rows, columns, bias) in (linears if experts else linears | mlp).items():
            shapes[f"{p}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{p}{name}.bias"] = (rows,)
        shapes |= {p + name: (hidden,) for name in gemma_norms(arch)}
        if arch in {"qwen3", "qwen3_moe", "gemma3_text"}:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (head,)
        if arch in {"olmo2", "olmo3"}:
            shapes[p + "self_attn.q_norm.weight"] = (q,)
            shapes[p + "self_attn.k_norm.weight"] = (kv,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, wide enough that greedy tokens vary and logits differ by position."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        norm = len(shape) == 1 and name.endswith("norm.weight")
        scale = 1.0 if "embed" in name else 1.5 / math.sqrt(shape[-1])
        one = 0 if config["model_type"] in GEMMA else 1
        weights[name] = (one + 0.1 * noise if norm else scale * noise).to(dtype)
    return weights


def make_tiny_model(
    directory: Path,
    *,
    arch: str = "qwen3",
    rope: str = "default",
    seed: int = 0,
    shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a model into `directory` (made if absent) and return it. `overrides` go into config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    if arch in FAMILIES or arch in SIBLINGS:
        make_family(directory, arch, shards=shards, seed=seed, **overrides)
    else:
        config = tiny_config(arch, rope, **overrides)
        write_json(directory / "config.json", config)
        save_sharded(directory, tiny_weights(config, seed), shards)
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": [2, 0], "do_sample": True, "temperature": 0.8, "top_p": 0.95},
    )
    if tokenizer:
        write_tokenizer(directory, overrides.get("vocab_size", VOCAB))
    return directory


def save_sharded(directory: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in weights.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_tokenizer(directory: Path, vocab_size: int = VOCAB) -> None:
    """Ids 0..2 are the special tokens, the next 256 the bytes, then a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, VOCAB),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog and then the other thing in the morning; "
    tokenizer.train_from_iterator([text * 4, "user assistant system hello world token tokens\n"], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHATML,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 256,
        },
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
