"""Families of vision towers: how their files are read, and how a picture of a given size is laid out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoint.files import read_json
from .config import ImageLayout, VisionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """Rules of one family."""

    read: Callable[[Path, dict[str, Any]], VisionConfig]
    """Rule (folder, its config.json) -> vision part. Raises ModelError."""
    lay_out: Callable[[VisionConfig, int, int, bool], ImageLayout]
    """Rule (vision part, width, height, low detail) -> layout. Raises ValueError for a size that the
    reference processor refuses."""


VISION_FAMILIES: dict[str, VisionFamily] = {}
"""Families by `model_type` of config.json."""


def read_vision(path: Path) -> VisionConfig | None:
    """Return the vision part of a model folder; None where it has none that is known. Raises ModelError."""
    file = path / "config.json"
    raw = read_json(file) if file.exists() else {}
    family = VISION_FAMILIES.get(str(raw.get("model_type")))
    if family is None or "vision_config" not in raw:
        return None
    return family.read(path, raw)


def lay_out_image(vision: VisionConfig, width: int, height: int, *, low_detail: bool = False) -> ImageLayout:
    """Return tiles, rows and text of a picture of this size, in pixels after its EXIF turn."""
    return VISION_FAMILIES[vision.family].lay_out(vision, width, height, low_detail)
