"""Projector file of a GGUF model (mmproj): its vision tower as a checkpoint's config.json describes it.

Torch-free.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import ModelError
from ..model_config.fields import Fields
from ..model_config.vision.families import VISION_FAMILIES, describe_vision
from .projector_families import ClipFields, ProjectorFamily, family_of
from .projector_tensors import check_projector_tensors
from .reader import GgufFile, read_gguf

CLIP: Final = "clip"
"""Architecture of such files."""


def read_projector(path: Path) -> GgufFile:
    """Read the header of a projector file. Raises ModelError."""
    return check_projector(read_gguf(path))


def check_projector(file: GgufFile) -> GgufFile:
    """Return the file. Raises ModelError where it is no projector that is read here."""
    if file.architecture != CLIP:
        raise ModelError(
            f"{file.path} is not a projector (mmproj) file: it contains a {file.architecture} model"
        )
    family_of(file)
    return file


def with_vision(
    config: Mapping[str, Any], gguf: GgufFile, projector: GgufFile
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json of model and projector together, and preprocessor_config.json.

    `config`: that of the model alone. Raises ModelError for files that are not of one model, and where the
    projector lacks a tensor.
    """
    family, clip = family_of(projector), ClipFields(projector)
    if gguf.architecture not in family.types:
        raise ModelError(
            f"{projector.path} is for {' or '.join(family.types)}, and {gguf.path.name} is "
            f"{gguf.architecture}: they do not belong to the same model"
        )
    if clip.width != config["hidden_size"]:
        raise ModelError(
            f"{projector.path} has embeddings of {clip.width} numbers, {gguf.path.name} has "
            f"{config['hidden_size']}: they do not belong to the same model"
        )
    name, model_type, text_type = family.types[gguf.architecture]
    tower, keys, rules = family.describe(clip)
    text = dict(config)
    whole = {key: text.pop(key) for key in ("quantization_config",) if key in text}
    text |= {"model_type": text_type or text["model_type"]}
    if model_type.startswith(("qwen", "glm")):
        text["rope_parameters"] = text["rope_parameters"] | _sections(gguf, model_type)
    token = _token_id(gguf, projector, family)
    found = {
        "architectures": [name],
        "model_type": model_type,
        **{key: config[key] for key in ("dtype", "tie_word_embeddings") if key in config},
        **keys,
        "image_token_id": token,
        "image_token_index": token,
        "text_config": text,
        "vision_config": tower,
        **whole,
    }
    for key in ("image_mean", "image_std"):
        if values := clip.numbers(key):
            rules[key] = [float(f"{value:.8g}") for value in values]
    where = str(projector.path)
    vision = describe_vision(VISION_FAMILIES[model_type], Fields(found, where), rules, where)
    check_projector_tensors(projector, vision)
    return found, rules


def _sections(gguf: GgufFile, model_type: str) -> dict[str, Any]:
    """Return the sections of M-RoPE, of which files have four; without them the family's are taken."""
    sections = gguf.value("rope.dimension_sections")
    known: dict[str, Any] = {"mrope_interleaved": True} if model_type.startswith("qwen3") else {}
    if isinstance(sections, list) and len(sections) >= 3:
        known["mrope_section"] = sections[:3]
    return known


def _token_id(gguf: GgufFile, projector: GgufFile, family: ProjectorFamily) -> int:
    words = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(words, list) or family.image_mark not in words:
        raise ModelError(
            f"{projector.path}: the vocabulary of {gguf.path.name} has no {family.image_mark}, which stands "
            "for an image: they do not belong to the same model"
        )
    return words.index(family.image_mark)
