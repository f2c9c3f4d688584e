"""Families whose pictures are read, by the `model_type` of config.json."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...checkpoint.files import read_json
from ...errors import ModelError
from ..fields import Fields, text_fields
from .config import VisionConfig
from .fields import VisionFiles, VisionRule
from .qwen import glm_ocr, qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from .siglip import gemma3, gemma4, idefics3, lfm2_vl, mistral3
from .tensors import check_vision_tensors, list_tower_tensors

VISION_FAMILIES: Final[dict[str, VisionRule]] = {
    "mistral3": mistral3,
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
    "lfm2_vl": lfm2_vl,
    "glm_ocr": glm_ocr,
}
_NESTED: Final = "image_processor"
"""Key of processor_config.json with what preprocessor_config.json has alone."""


def read_vision(directory: Path) -> VisionConfig | None:
    """Return the vision part of a model folder; None where pictures are not read (`explain_no_vision`).

    Raises ModelError for files that contradict each other, with the name of the key or tensor.
    """
    model = _read(directory, "config.json")
    rule = VISION_FAMILIES.get(str(model.raw.get("model_type")))
    tower = model.mapping("vision_config")
    if rule is None or tower is None:
        return None
    text = text_fields(model)
    files = VisionFiles(
        model=model,
        tower=Fields(tower, f"{model.where}: vision_config"),
        processor=_processor(directory),
        tokenizer=_read(directory, "tokenizer_config.json"),
        text=text,
        hidden_size=text.integer("hidden_size"),
    )
    vision = rule(files)
    tensors = list_tower_tensors(vision.tower, vision.hidden_size)
    if any(directory.glob("*.safetensors*")) and not check_vision_tensors(directory, tensors):
        return None
    return replace(vision, tensors=tensors)


def find_vision(directory: Path) -> tuple[VisionConfig | None, str]:
    """Return the vision part of a model folder, or why there is none. Its text is served all the same."""
    try:
        vision = read_vision(directory)
    except ModelError as error:
        return None, str(error)
    return vision, "" if vision else explain_no_vision(directory)


def explain_no_vision(directory: Path) -> str:
    """Return why pictures cannot be sent to the model of a folder for which `read_vision` returns None."""
    raw = _read(directory, "config.json").raw
    if raw.get("vision_config") is None:
        return "it is a language model without a vision tower"
    kind = raw.get("model_type")
    if kind not in VISION_FAMILIES:
        return f"the vision tower of {kind} is not supported; docs/models.md lists those that are"
    return "its files have no tensors of the vision tower: take a checkpoint that includes it"


def _processor(directory: Path) -> Fields:
    nested = _read(directory, "processor_config.json")
    own = nested.mapping(_NESTED)
    if own is not None:
        return Fields(own, f"{nested.where}: {_NESTED}")
    return _read(directory, "preprocessor_config.json")


def _read(directory: Path, name: str) -> Fields:
    """Return the fields of a file; none where it does not exist. Raises ModelError."""
    file = directory / name
    raw: Any = read_json(file) if file.exists() else {}
    if not isinstance(raw, dict):
        raise ModelError(f"{file} must be a JSON object")
    return Fields(raw, str(file))
