"""Folders that declare how texts become vectors, as sentence-transformers writes them."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from support.tiny_models import make_tiny_model, tiny_config, tiny_weights, write_json

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def declare(directory: Path, *modes: str, modules: Any = MODULES) -> Path:
    write_json(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir(exist_ok=True)
    pooling = {f"pooling_mode_{mode}": mode in modes for mode in MODES}
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **pooling})
    return directory


def make_pooled_model(directory: Path, mode: str = "lasttoken", **overrides: Any) -> Path:
    """As Qwen3-Embedding is stored: no head, short names."""
    make_tiny_model(directory, **overrides)
    config = tiny_config(**overrides)
    weights = tiny_weights(config)
    weights.pop("lm_head.weight", None)
    short = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(short, directory / "model.safetensors", metadata={"format": "pt"})
    return declare(directory, mode)
