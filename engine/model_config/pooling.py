"""Pooling configuration of embedding models, in the files of sentence-transformers.

modules.json            list of modules: a transformer, a pooling, maybe a normalization
1_Pooling/config.json   pooling mode
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.files import read_json, read_value
from ..checkpoint.index import list_tensors
from ..errors import ModelError
from ..sampling_params import Pooling
from .fields import Fields

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",  # another norm, which is 1 after normalization
    "pooling_mode_cls_token": "cls",
}
_NAMES: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "cls": "cls",
}
"""Values of `pooling_mode` in newer folders."""
_STEPS = {"Transformer", "Pooling", "Normalize"}


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling of a model, declared by its folder or by default."""

    pooling: Pooling
    is_declared: bool
    """True if the folder declares pooling: the model was made for embeddings."""
    problem: str = ""
    """Reason why the declared pooling is not supported; empty if it is."""


def is_declared(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (MODULES_FILE, POOLING_FILE))


def read_pooling(directory: Path, *, generates: bool) -> PoolingConfig:
    """Return the declared pooling of a model's folder. Default: mean for a model that generates text, else
    the last token.

    Never raises: a model with an unsupported declaration may still be loaded.
    """
    default: Pooling = "mean" if generates else "last"
    if not is_declared(directory):
        return PoolingConfig(default, is_declared=False)
    try:
        return PoolingConfig(_read_declared(directory), is_declared=True)
    except ModelError as error:
        return PoolingConfig(default, is_declared=True, problem=str(error).replace(f"{directory}/", ""))


def _read_declared(directory: Path) -> Pooling:
    """Read the declared pooling. Raises ModelError."""
    folder = "1_Pooling"
    if (directory / MODULES_FILE).is_file():
        folder = _pooling_folder(directory / MODULES_FILE)
    return _pooling(directory / folder / "config.json")


def _pooling_folder(file: Path) -> str:
    steps = read_value(file)
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ModelError(f"{file} must hold a list of modules")
    kinds = [str(step.get("type")).rpartition(".")[2] for step in steps]
    if unknown := [kind for kind in kinds if kind not in _STEPS]:
        raise ModelError(f"{file} asks for the module {unknown[0]}, which is not supported")
    if kinds.count("Pooling") != 1:
        raise ModelError(f"{file} must name one Pooling module")
    folder = steps[kinds.index("Pooling")].get("path")
    if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
        raise ModelError(f"{file}: {folder!r} is not a folder beside it")
    return folder


def _pooling(file: Path) -> Pooling:
    raw = read_json(file)
    if "pooling_mode" in raw:
        return _one_of(_NAMES, [Fields(raw, str(file)).text("pooling_mode")], file)
    return _one_of(_MODES, _enabled_modes(raw), file)


def _enabled_modes(raw: dict[str, Any]) -> list[str]:
    return [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]


def _one_of(known: dict[str, Pooling], asked: list[str], file: Path) -> Pooling:
    if len(asked) != 1 or asked[0] not in known:
        raise ModelError(
            f"{file} asks for {' and '.join(asked) or 'no pooling'}; supported is one of the last token, the "
            "mean of all, and the first (cls)"
        )
    return known[asked[0]]


HEAD = "lm_head.weight"
_WHOLE = "ForCausalLM"
_OTHERS = ("ForSequenceClassification", "Model")
"""Suffixes of class names of the same transformer without an output head."""


def with_head(architecture: str) -> str:
    """Return the class name with the output head: `Qwen3ForCausalLM` for `Qwen3Model`."""
    end = next((end for end in _OTHERS if architecture.endswith(end)), None)
    return architecture if end is None else architecture.removesuffix(end) + _WHOLE


def has_head(fields: Fields, directory: Path) -> bool:
    """Return True if the model has an output head, by the class name, tied embeddings, or the weight files.

    A folder without pooling configuration is expected to have a head: without one it is damaged.
    """
    named = fields.raw.get("architectures") or []
    names = named if isinstance(named, list) else [named]
    if any(isinstance(name, str) and name.endswith(_OTHERS) for name in names):
        return False
    if fields.flag("tie_word_embeddings", default=False) or not is_declared(directory):
        return True
    try:
        return HEAD in list_tensors(directory)
    except ModelError:  # loading says why
        return True
