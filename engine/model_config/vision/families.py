"""Families whose pictures are read, by the `model_type` of config.json."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...checkpoint.files import read_json
from ...checkpoint.index import list_vision_tensors
from ...errors import ModelError
from ..fields import Fields, text_fields
from .config import VisionConfig
from .fields import VisionFiles, VisionRule
from .qwen import glm_ocr, lfm3_vl, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from .shape import NO_TOWER
from .siglip import gemma3, gemma4, gemma4_unified, idefics3, lfm2_vl, llava, mistral3
from .tensors import check_vision_tensors, list_tower_tensors

VISION_FAMILIES: Final[dict[str, VisionRule]] = {
    "mistral3": mistral3,
    "llava": llava,
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "gemma3": gemma3,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "gemma4": gemma4,
    "gemma4_unified": gemma4_unified,
    "lfm2_vl": lfm2_vl,
    "lfm3_vl": lfm3_vl,
    "glm_ocr": glm_ocr,
}
_NESTED: Final = "image_processor"
"""Key of processor_config.json with what preprocessor_config.json has alone."""
IMAGE_PROBLEM: Final = "llmbox_image_problem"
"""Key of a GGUF file's config.json: why no projector file is read beside it."""


def read_vision(directory: Path) -> VisionConfig | None:
    """Return the vision part of a model folder; None where pictures are not read (`find_vision`).

    Raises ModelError, with the name of the tensor, for files that do not hold the tower of config.json.
    """
    return find_vision(directory)[0]


def find_vision(directory: Path) -> tuple[VisionConfig | None, str]:
    """Return the vision part of a model folder, or why pictures cannot be sent to it: its text works then as
    ever. Raises ModelError as `read_vision`.
    """
    model = _read(directory, "config.json")
    tower, kind = model.raw.get("vision_config"), model.raw.get("model_type")
    if tower is None:
        return None, why_no_tower(model)
    rule = VISION_FAMILIES.get(str(kind))
    if rule is None:
        return None, f"the vision tower of {kind} is not supported; docs/models.md lists those that are"
    try:
        vision = rule(_read_files(directory, model))
    except ModelError as error:
        return None, f"its vision tower is not supported: {error}"
    tensors = list_tower_tensors(vision.tower, vision.hidden_size)
    try:
        entries = list_vision_tensors(directory)
    except ModelError:  # loading says why
        return replace(vision, tensors=tensors), ""
    if not entries.keys() & tensors.keys():
        return None, "its files have no tensors of the vision tower: take a checkpoint that includes it"
    try:
        check_vision_tensors(directory, entries, tensors)
    except ModelError as error:
        if model.raw.get("quantization_config") is None:
            raise
        return None, f"its vision tower is quantized, which is not supported: {error}"
    return replace(vision, tensors=tensors), ""


def why_no_tower(model: Fields) -> str:
    """Return why a model whose config.json has no tower reads no pictures."""
    return model.text(IMAGE_PROBLEM, NO_TOWER)


def describe_vision(rule: VisionRule, model: Fields, rules: Mapping[str, Any], where: str) -> VisionConfig:
    """Return the vision part of a model by the content of its files: config.json, and `rules` of its image
    processor. Raises ModelError.
    """
    text = text_fields(model)
    files = VisionFiles(
        model=model,
        tower=Fields(model.mapping("vision_config") or {}, where),
        processor=Fields(rules, where),
        tokenizer=Fields({}, where),
        text=text,
        hidden_size=text.integer("hidden_size"),
    )
    vision = rule(files)
    return replace(vision, tensors=list_tower_tensors(vision.tower, vision.hidden_size))


def _read_files(directory: Path, model: Fields) -> VisionFiles:
    text = text_fields(model)
    return VisionFiles(
        model=model,
        tower=Fields(model.mapping("vision_config") or {}, f"{model.where}: vision_config"),
        processor=_processor(directory),
        tokenizer=_read(directory, "tokenizer_config.json"),
        text=text,
        hidden_size=text.integer("hidden_size"),
    )


def _processor(directory: Path) -> Fields:
    nested = _read(directory, "processor_config.json")
    own = nested.mapping(_NESTED)
    if own is not None:
        return Fields(own, f"{nested.where}: {_NESTED}")
    return _read(directory, "preprocessor_config.json")


def _read(directory: Path, name: str) -> Fields:
    """Return the fields of a file; none where it does not exist. Raises ModelError."""
    file = directory / name
    return Fields(read_json(file) if file.exists() else {}, str(file))
