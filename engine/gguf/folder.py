"""Model folder of a GGUF file: config.json and generation_config.json made of its metadata, and a link to it.

The weights stay in the file. Everything that takes a checkpoint's folder takes this one.
"""

import json
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from llmbox.kernels.quant_formats import GGUF_QUANTS

from ..checkpoint.safetensors import TensorEntry
from ..model_config.shape import DTYPE_BYTES
from .config import config_of, dtype_of, generation_of, rope_factors
from .reader import FLOATS, GgufFile

LINK = "llmbox.gguf"
"""Name of the link to the file; of a model in several files, to the first. It is one that no repository has:
a `model.gguf` beside safetensors is another file.
"""


def gguf_of(directory: Path) -> Path | None:
    """Return the GGUF file that holds the weights of a model folder; None for other folders."""
    link = directory / LINK
    return link.readlink() if link.is_symlink() else None


def describe_blocks(gguf: GgufFile) -> dict[str, Any] | None:
    """Return the `quantization_config` of a file's blocks; None for a file of floats."""
    weights: Counter[str] = Counter()
    groups: dict[str, list[TensorEntry]] = {"layers": [], "head": [], "table": []}
    for name, entry in gguf.tensors.items():
        if len(entry.shape) < 2 or name.endswith("ffn_gate_inp.weight"):
            continue
        weights[entry.dtype] += prod(entry.shape)
        groups[
            "table" if name == "token_embd.weight" else "layers" if name.startswith("blk.") else "head"
        ].append(entry)
    types = [kind for kind, _ in weights.most_common() if kind not in FLOATS]
    if not types:
        return None
    groups["head"] = groups["head"] or groups["table"]
    wide = DTYPE_BYTES[dtype_of(gguf)]
    return {
        "quant_method": "gguf",
        "types": types,
        "unit": max(GGUF_QUANTS[kind].unit for kind in types),
        "bytes_per_weight": {name: _bytes_per_weight(entries, wide) for name, entries in groups.items()},
    }


def _bytes_per_weight(entries: Sequence[TensorEntry], wide: int) -> float:
    weights = sum(prod(entry.shape) for entry in entries)
    sizes = (
        prod(entry.shape) * (wide if entry.dtype in FLOATS else GGUF_QUANTS[entry.dtype].bytes_per_weight)
        for entry in entries
    )
    return round(sum(sizes) / max(1, weights), 6) or float(wide)


def config_json(gguf: GgufFile, factors: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the config.json of a file. `factors`: RoPE divisors of a tensor. Raises ModelError."""
    config = config_of(gguf, factors)
    described = describe_blocks(gguf)
    return config if described is None else config | {"quantization_config": described}


def write_folder(gguf: GgufFile, folder: Path) -> None:
    """Write the folder's files but the tokenizer's. Raises ModelError and OSError."""
    config = config_json(gguf, rope_factors(gguf))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = json.dumps(generation_of(gguf), indent=2)
    (folder / "generation_config.json").write_text(generation + "\n", encoding="utf-8")
    (folder / LINK).symlink_to(gguf.path)
