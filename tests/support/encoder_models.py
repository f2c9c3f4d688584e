"""Tiny random encoders of the BERT family, and folders that declare how their vectors are made."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.tiny_models import write_json

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}
ROBERTA = {**SIZES, "max_position_embeddings": 82, "pad_token_id": 1, "type_vocab_size": 1}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", ROBERTA),
    "xlm-roberta": ("XLMRoberta", ROBERTA),
    "mpnet": ("MPNet", {**SIZES, "max_position_embeddings": 82}),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": 320, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4,
            "max_position_embeddings": 80,
        },
    ),
    "modernbert": (
        "ModernBert",
        {
            **SIZES, "num_hidden_layers": 4, "local_attention": 16, "pad_token_id": 0, "eos_token_id": 1,
            "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 1,
        },
    ),
    "nomic_bert": ("NomicBert", SIZES),
    "gte": ("Gte", {**SIZES, "type_vocab_size": 1}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {**SIZES, "type_vocab_size": 1}),
}  # fmt: skip
"""Prefix of the classes in transformers, and values of the config."""
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def make_encoder(directory: Path, kind: str, end: str = "Model", **changes: Any) -> Any:
    """Write a checkpoint and return the model of transformers in float32."""
    import transformers

    name, values = ENCODERS[kind]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}{end}")(config).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 or "embed" in each else 1.2 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (each.endswith("orm.weight")))
    model.save_pretrained(directory)
    return model


def declare_vectors(
    directory: Path, mode: str = "mean_tokens", dense: tuple[tuple[int, int, str], ...] = ()
) -> list[torch.Tensor]:
    """Write what sentence-transformers writes. `dense`: inputs, outputs, activation of each layer."""
    modules, weights = list(MODULES), []
    for number, (inputs, outputs, activation) in enumerate(dense, 2):
        folder = directory / f"{number}_Dense"
        folder.mkdir()
        modules.append({"path": folder.name, "type": "sentence_transformers.models.Dense"})
        fields = {"in_features": inputs, "out_features": outputs, "bias": False}
        write_json(folder / "config.json", fields | {"activation_function": f"torch.nn.modules.{activation}"})
        weights.append(torch.randn(outputs, inputs) * inputs**-0.5)
        save_file({"linear.weight": weights[-1]}, folder / "model.safetensors")
    modules.append({"path": "9_Normalize", "type": "sentence_transformers.models.Normalize"})
    write_json(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir(exist_ok=True)
    write_json(directory / "1_Pooling" / "config.json", {f"pooling_mode_{mode}": True})
    return weights


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    write_json(file, json.loads(file.read_text()) | changes)
