"""Model folder of a GGUF file: config.json and generation_config.json made of its metadata, and a link to it.
With a projector file also preprocessor_config.json and a link to that, of a model for embeddings files that
declare its pooling, dense layers and prompts.

The weights stay in the files. Everything that takes a checkpoint's folder takes this one.
"""

import json
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

from llmbox.kernels.quant_formats import GGUF_QUANTS

from ..checkpoint.files import read_json
from ..checkpoint.safetensors import TensorEntry, shown
from ..errors import ModelError
from ..model_config.encoders.config import MODULES_FILE, POOLING_FILE, PROMPTS_FILE
from ..model_config.fields import Fields
from ..model_config.shape import DTYPE_BYTES
from ..model_config.vision.families import IMAGE_PROBLEM
from .architectures import architecture_of
from .config import RANKING, RopeFactors, config_of, dtype_of, generation_of, rope_factors
from .families import has_scores
from .names import HEAD, SCORES, TABLE
from .projector import read_projector, with_vision
from .reader import BLOCKS, FLOATS, GgufFile, read_gguf

LINK = "llmbox.gguf"
"""Name of the link to the file; of a model in several files, to the first. It is one that no repository has:
a `model.gguf` beside safetensors is another file.
"""

PROJECTOR_LINK = "llmbox.mmproj.gguf"
"""Name of the link to the projector file."""
_SEEING: Final = {
    *("gemma3", "gemma4", "llama4", "mistral3", "mistral4"),
    *("qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"),
}
"""Architectures that nearly always have a projector."""

ROWS_FILE = "llmbox.rows.json"
"""Places of the matrices of which rows rank and classify texts. With them nobody has to read the header of
the GGUF file again, which takes a quarter of a second where it lists 150,000 tokens.
"""
_POOLINGS: Final = {1: "mean", 2: "cls", 3: "lasttoken"}
"""Values of `pooling_type`, by the names of sentence-transformers. 0: the file does not say."""
_RANKS: Final = 4
_DENSE: Final = ("dense_2", "dense_3")
"""Tensors of dense layers over the pooled vector, in their order."""
_NOMIC_TASKS: Final = {
    "query": "search_query: ",
    "document": "search_document: ",
    "classification": "classification: ",
    "clustering": "clustering: ",
}
_PROMPTS: Final = {
    "gemma-embedding": {"query": "task: search result | query: ", "document": "title: none | text: "},
    "nomic-bert": _NOMIC_TASKS,
    "nomic-bert-moe": _NOMIC_TASKS,
}
"""Prompts of the published models, which files do not have, by architecture. None is put before a text unless
a request names it.
"""


def gguf_of(directory: Path) -> Path | None:
    """Return the GGUF file that holds the weights of a model folder; None for other folders."""
    link = directory / LINK
    return link.readlink() if link.is_symlink() else None


def projector_of(directory: Path) -> Path | None:
    """Return the projector file of a model folder; None for one that has its tower elsewhere, or none."""
    link = directory / PROJECTOR_LINK
    return link.readlink() if link.is_symlink() else None


def describe_blocks(gguf: GgufFile) -> dict[str, Any] | None:
    """Return the `quantization_config` of a file's blocks; None for a file of floats."""
    weights: Counter[str] = Counter()
    groups: dict[str, list[TensorEntry]] = {"layers": [], "head": [], "table": []}
    for name, entry in gguf.tensors.items():
        if len(entry.shape) < 2 or name.endswith("ffn_gate_inp.weight") or name.startswith(("v.", "mm.")):
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
        "unit": max([32, *(BLOCKS[kind][0] for kind in types if kind in GGUF_QUANTS)]),
        "bytes_per_weight": {name: _bytes_per_weight(entries, wide) for name, entries in groups.items()},
    }


def _bytes_per_weight(entries: Sequence[TensorEntry], wide: int) -> float:
    weights = sum(prod(entry.shape) for entry in entries)
    sizes = (
        prod(entry.shape)
        * (GGUF_QUANTS[entry.dtype].bytes_per_weight if entry.dtype in GGUF_QUANTS else wide)
        for entry in entries
    )
    return round(sum(sizes) / max(1, weights), 6) or float(wide)


def config_json(
    gguf: GgufFile,
    factors: RopeFactors | None = None,
    projector: GgufFile | None = None,
    problem: str = "",
) -> dict[str, dict[str, Any]]:
    """Return config.json and, with a projector, preprocessor_config.json by name. Raises ModelError.

    `factors`: as in `config_of`. `problem`: why there is no projector.
    """
    config = config_of(gguf, factors)
    described = describe_blocks(gguf)
    if described is not None:
        config["quantization_config"] = described
    if projector is not None:
        config, rules = with_vision(config, gguf, projector)
        return {"config.json": config, "preprocessor_config.json": rules}
    if not problem and gguf.architecture in _SEEING:
        problem = "no projector file (mmproj*.gguf), which has its vision tower, lies beside its GGUF file"
    return {"config.json": config | {IMAGE_PROBLEM: problem} if problem else config}


def write_folder(gguf: GgufFile, folder: Path, projector: Path | None = None, problem: str = "") -> None:
    """Write the folder's files but the tokenizer's. `projector`, `problem`: as in `config_json`. Raises
    ModelError and OSError.
    """
    vision = None if projector is None else read_projector(projector)
    files = config_json(gguf, rope_factors(gguf), vision, problem)
    files |= vector_files(gguf) | {
        "generation_config.json": generation_of(gguf),
        ROWS_FILE: _row_places(gguf),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / LINK).symlink_to(gguf.path)
    if projector is not None:
        (folder / PROJECTOR_LINK).symlink_to(projector)


def _row_places(gguf: GgufFile) -> dict[str, Any]:
    return {
        name: {
            "file": str(entry.file),
            "stamp": _stamp(entry.file),
            "dtype": entry.dtype,
            "shape": entry.shape,
            "offset": entry.offset,
            "nbytes": entry.nbytes,
        }
        for name in (SCORES, HEAD, TABLE)
        if (entry := gguf.tensors.get(name)) is not None
    }


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    return f"{status.st_size} {status.st_mtime_ns}"


def find_matrix(folder: Path, tensor: str) -> TensorEntry:
    """Return where a matrix of which rows are asked is in the GGUF file of a folder, by `ROWS_FILE`; where an
    older version made the folder, or the file has changed, by the file's header. Raises ModelError.
    """
    link = gguf_of(folder)
    assert link is not None
    entry = _kept_place(folder, tensor) or read_gguf(link).tensors.get(tensor)
    if entry is None:
        raise ModelError(f"{link}: tensor {shown(tensor)} is missing")
    return entry


def _kept_place(folder: Path, tensor: str) -> TensorEntry | None:
    """Return the place of a matrix by `ROWS_FILE`; None where that is missing, damaged or out of date."""
    try:
        fields = Fields(Fields(read_json(folder / ROWS_FILE), ROWS_FILE).mapping(tensor) or {}, ROWS_FILE)
        file, shape = Path(fields.text("file")), tuple(map(int, fields.numbers("shape")))
        if fields.text("stamp") != _stamp(file):
            return None
        offset, nbytes = fields.integer("offset"), fields.integer("nbytes")
        return TensorEntry(file, tensor, fields.text("dtype"), shape, offset, nbytes)
    except ModelError:
        return None


def vector_files(gguf: GgufFile) -> dict[str, Any]:
    """Return the files of sentence-transformers that declare how a model makes vectors, by name; none where
    the file does not say it. Raises ModelError.
    """
    files: dict[str, Any] = {}
    if prompts := _PROMPTS.get(gguf.architecture):
        files[PROMPTS_FILE] = {"prompts": prompts}
    kind, is_encoder = gguf.value("pooling_type", 0), architecture_of(gguf).is_encoder
    has_head = kind == _RANKS or any(name.startswith("cls.") for name in gguf.tensors)
    if has_scores(gguf) or (has_head and gguf.architecture in RANKING):
        return files
    if has_head:
        why = (
            "of encoders with a head (rerankers, classifiers) only RoBERTa, XLM-R, DistilBERT and ModernBERT "
            "can be read from GGUF, files of others lack a part of it; take its safetensors"
        )
        if not is_encoder:
            why = (
                f"rerankers of {gguf.architecture} cannot be read from GGUF, of decoders only those of "
                "Qwen3; take its safetensors"
            )
        raise ModelError(f"{gguf.path}: {why}")
    dense = [name for name in _DENSE if f"{name}.weight" in gguf.tensors]
    if kind == 0 and not dense:
        return files
    if type(kind) is not int or kind not in {0, *_POOLINGS}:
        raise ModelError(
            f"{gguf.path}: {gguf.architecture}.pooling_type is {str(kind)[:80]}, 0 to 4 is known"
        )
    files[POOLING_FILE] = {"pooling_mode": _POOLINGS.get(kind, "mean")}
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    for name in dense:
        folder, shape = f"{name[-1]}_Dense", gguf.tensors[f"{name}.weight"].shape
        if len(shape) != 2:
            raise ModelError(f"{gguf.path}: tensor {name}.weight is not a matrix")
        outputs, inputs = shape
        steps.append(("Dense", folder))
        files[f"{folder}/config.json"] = {
            "in_features": inputs,
            "out_features": outputs,
            "bias": f"{name}.bias" in gguf.tensors,
            "activation_function": "torch.nn.modules.linear.Identity",
            "gguf_tensor": name,
        }
    files[MODULES_FILE] = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{name}"}
        for idx, (name, path) in enumerate([*steps, ("Normalize", "9_Normalize")])
    ]
    return files
