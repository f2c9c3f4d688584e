"""Tiny models under other names than those of transformers: changes of files, and a DeciLM."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from .families import make_family
from .real_engines import hf_model

Weights = dict[str, Tensor]


def rewrite(model: Path, changed: Callable[[Weights], Weights], config: Mapping[str, Any]) -> None:
    """Change the tensors and keys of a model; a key with None is left out."""
    file = model / "model.safetensors"
    weights = {name: tensor.contiguous() for name, tensor in changed(load_file(file)).items()}
    save_file(weights, file, metadata={"format": "pt"})
    raw = json.loads((model / "config.json").read_text()) | config
    (model / "config.json").write_text(json.dumps({key: x for key, x in raw.items() if x is not None}))


BLOCKS = [
    {"attention": {"n_heads_in_group": 2, "no_op": False}, "ffn": {"ffn_mult": 9.1, "no_op": False}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 9.1}},
    {"attention": {"no_op": True, "n_heads_in_group": None}, "ffn": {"no_op": True, "ffn_mult": None}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True, "ffn_mult": None}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 3.0, "replace_with_linear": False}},
]
"""Layers of a DeciLM with 64 hidden numbers: MLPs of 512, 512, 0, 0 and 256 rows."""
DECILM = {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "block_configs": BLOCKS}
DECILM |= {"auto_map": {"AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"}}
_LACKING = (
    *("layers.1.self_attn.", "layers.1.input_layernorm.", "layers.2.", "layers.3.mlp."),
    "layers.3.post_attention_layernorm.",
)


def make_decilm(directory: Path) -> tuple[Path, Any]:
    """Return a model, and that of transformers which computes the same."""
    model = make_family(directory, "llama", num_hidden_layers=5, intermediate_size=512)
    rewrite(model, without_parts, {})
    theirs = hf_model(model)
    rewrite(model, as_decilm, DECILM | {"num_key_value_heads": None, "intermediate_size": None})
    return model, theirs


def without_parts(weights: Weights) -> Weights:
    """Return weights that compute what a DeciLM does: zeros for what its layers lack."""
    found = dict(weights)
    for layer, part in ((1, "self_attn.o"), (2, "self_attn.o"), (2, "mlp.down"), (3, "mlp.down")):
        found[f"model.layers.{layer}.{part}_proj.weight"] *= 0
    found["model.layers.4.mlp.down_proj.weight"][:, 256:] = 0
    return found


def as_decilm(weights: Weights) -> Weights:
    found = {name: x for name, x in weights.items() if not any(part in name for part in _LACKING)}
    for name in [name for name in found if "layers.4.mlp." in name]:
        found[name] = found[name][:, :256] if "down" in name else found[name][:256]
    return found
