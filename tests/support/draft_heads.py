"""Tiny models whose next token hangs on the last one, and draft heads that know how.

The successor of each token is a fixed one, nearly always: layers add little to the embeddings, and the output
head finds the embedding of the token before. So heads agree often, and not always.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.core.speculation.model_drafting import ModelDrafting
from support.real_engines import draft_at_no_price
from support.tiny_models import make_tiny_model, tiny_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
RESIDUAL = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
FIRST = 5
"""Smaller ids are special and succeed nothing."""


def ask_always(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have heads asked for so many drafts wherever there is room: tests of heads are not about what pays."""

    def choose(
        _self: Any, requests: Any, _chances: Any, lengths: Any, prices: Any
    ) -> tuple[list[int], float]:
        most = min(count, (len(prices) - 1) // len(requests))
        found = zip(requests, lengths, strict=True)
        return [0 if length > 1 else min(limit, most) for (_, limit), length in found], 2.0

    draft_at_no_price(monkeypatch)
    monkeypatch.setattr(ModelDrafting, "choose", choose)


def successors(vocab: int, steps: int = 1) -> torch.Tensor:
    """The token that follows each one after so many steps."""
    order = FIRST + torch.randperm(vocab - FIRST, generator=torch.Generator().manual_seed(3))
    after = torch.arange(vocab)
    after[order] = order.roll(-1)
    found = torch.arange(vocab)
    for _ in range(steps):
        found = after[found]
    return found


def predicting(embedding: torch.Tensor, steps: int) -> torch.Tensor:
    """An output head that maps each token's embedding to the token so many steps on."""
    head = torch.zeros_like(embedding)
    head[successors(len(embedding), steps)] = embedding
    head[:FIRST] = 0
    return head


def make_predictable(directory: Path, damping: float = 0.15) -> Path:
    """Rewrite a model so that its layers add `damping` times as much as they did."""
    file = directory / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith((*RESIDUAL, "experts.down_proj"))]:
        weights[name] *= damping
    weights[HEAD] = predicting(weights[EMBEDDING].float(), 1).to(weights[EMBEDDING].dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def add_mtp(directory: Path, style: str, damping: float = 0.15) -> Path:
    """Add an MTP layer as its family publishes it: a copy of the last layer with attention, which reads the
    embedding of the next token alone.
    """
    file, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    weights = load_file(file)
    layers = config["num_hidden_layers"]
    like = max(i for i in range(layers) if f"model.layers.{i}.self_attn.o_proj.weight" in weights)
    names = {"qwen": "mtp.layers.0.", "deepseek": f"model.layers.{layers}."}
    source, target = f"model.layers.{like}.", names[style]
    copies = {target + n.removeprefix(source): w.clone() for n, w in weights.items() if n.startswith(source)}
    hidden, one = config["hidden_size"], 0.0 if style == "qwen" else 1.0
    norm = torch.full((hidden,), one)
    fc = torch.cat([torch.eye(hidden), damping * torch.randn(hidden, hidden) / hidden**0.5], 1)
    if style == "qwen":
        own = {"fc": fc, "pre_fc_norm_hidden": norm, "pre_fc_norm_embedding": norm.clone()}
        copies |= {f"mtp.{name}.weight": each for name, each in own.items()}
        copies["mtp.norm.weight"] = weights["model.norm.weight"].clone()
    else:
        own = {"eh_proj": fc, "hnorm": norm, "enorm": norm.clone()}
        own |= {"shared_head.norm": weights["model.norm.weight"].clone()}
        own |= {"embed_tokens": weights[EMBEDDING].clone(), "shared_head.head": weights[HEAD].clone()}
        copies |= {f"{target}{name}.weight": each for name, each in own.items()}
        (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    save_file(weights | copies, file, metadata={"format": "pt"})
    return directory


def make_target(directory: Path, **overrides: Any) -> Path:
    """A Llama for heads of folders of their own, of four layers."""
    return make_predictable(make_tiny_model(directory, arch="llama", **{"num_hidden_layers": 4, **overrides}))


def make_eagle3(directory: Path, target: Path, **overrides: Any) -> Path:
    """An EAGLE-3 head with a vocabulary of its own, every second token of the target's."""
    weights = load_file(target / "model.safetensors")
    embedding = weights[EMBEDDING]
    vocab, hidden = embedding.shape
    config = tiny_config("llama", num_hidden_layers=1, architectures=["LlamaForCausalLMEagle3"])
    config |= {
        "draft_vocab_size": vocab // 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    config |= overrides
    generator = torch.Generator().manual_seed(5)

    def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(rows, columns, generator=generator) / columns**0.5

    q, kv, inner = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    q, kv = q * config["head_dim"], kv * config["head_dim"]
    ids = torch.arange(0, vocab, 2)
    own = {
        "fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, 2 * hidden)], 1),
        "midlayer.hidden_norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
        "midlayer.input_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": draw(q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": draw(kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": draw(kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": draw(hidden, q, 0.3),
        "midlayer.mlp.gate_proj.weight": draw(inner, hidden),
        "midlayer.mlp.up_proj.weight": draw(inner, hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, inner, 0.3),
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": predicting(embedding, 2)[ids].contiguous(),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.arange(vocab) % 2 == 0,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_medusa(directory: Path, target: Path, heads: int = 3) -> Path:
    """Medusa heads as they are published, in a file of their own name."""
    embedding = load_file(target / "model.safetensors")[EMBEDDING]
    hidden, own = embedding.shape[1], {}
    generator = torch.Generator().manual_seed(6)
    for head in range(heads):
        own[f"{head}.0.linear.weight"] = 0.02 * torch.randn(hidden, hidden, generator=generator)
        own[f"{head}.0.linear.bias"] = 0.02 * torch.randn(hidden, generator=generator)
        own[f"{head}.1.weight"] = predicting(embedding, head + 2)
    directory.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/model"}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(own, directory / "medusa_lm_head.safetensors")
    return directory
