"""Resizing and tiling, for each family as its reference processor does."""

from collections.abc import Callable

from PIL.Image import Image

from llmbox.engine.model_config.vision.config import ImageLayout, VisionConfig

MakeTiles = Callable[[Image, VisionConfig, ImageLayout], list[Image]]
"""Rule (picture in RGB, vision part, layout) -> the tiles of the layout, in RGB."""

TILE_MAKERS: dict[str, MakeTiles] = {}
"""Rules by `VisionConfig.family`."""
