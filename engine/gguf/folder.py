"""Model folder of a GGUF file: config.json and generation_config.json made of its metadata, and a link to it.

The weights stay in the file. Everything that takes a checkpoint's folder takes this one.
"""

import json
from pathlib import Path

from .config import config_of, generation_of, rope_factors
from .reader import GgufFile

LINK = "llmbox.gguf"
"""Name of the link to the file; of a model in several files, to the first. It is one that no repository has:
a `model.gguf` beside safetensors is another file.
"""

SAME_NUMBERS = {"Q8_0": "int8-g32"}
"""Kernel formats that hold the numbers of a block format: layers keep the file's own integers."""


def gguf_of(directory: Path) -> Path | None:
    """Return the GGUF file that holds the weights of a model folder; None for other folders."""
    link = directory / LINK
    return link.resolve() if link.is_symlink() else None


def write_folder(gguf: GgufFile, folder: Path) -> None:
    """Write the folder's files but the tokenizer's. Raises ModelError and OSError."""
    config = config_of(gguf, rope_factors(gguf))
    blocks = {
        entry.dtype
        for name, entry in gguf.tensors.items()
        if name.startswith("blk.") and len(entry.shape) > 1 and not name.endswith("ffn_gate_inp.weight")
    }
    if len(blocks) == 1 and (quant := SAME_NUMBERS.get(blocks.pop())):
        config["quantization_config"] = {"quant_method": "gguf", "format": quant}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = json.dumps(generation_of(gguf), indent=2)
    (folder / "generation_config.json").write_text(generation + "\n", encoding="utf-8")
    (folder / LINK).symlink_to(gguf.path.resolve())
