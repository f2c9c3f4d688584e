"""Resizing and tiling, for each family as its image processor in transformers does.

Where transformers has two processors, pixels are those of the one that needs Pillow alone.
"""

from dataclasses import replace

from PIL.Image import Image, Resampling

from llmbox.engine.model_config.vision.config import ImageLayout, VisionConfig
from llmbox.engine.model_config.vision.layout import tiles_of


def make_tiles(picture: Image, vision: VisionConfig, layout: ImageLayout) -> list[Image]:
    """Return the tiles of the layout, in RGB. `picture`: in RGB, of the size that was laid out."""
    rules, sizes = vision.processor, layout.tiles
    if rules.kind == "tiles":
        rules = replace(rules, splits=layout.tile_grid != (0, 0))
        (first, second), _, _ = tiles_of(rules, *picture.size)
        whole = _resize(_resize(picture, first, rules.resample), second, rules.resample)
        if not rules.splits:
            return [whole]
        return [*_cut(whole, layout, rules.tile), _resize(whole, sizes[-1], rules.resample)]
    if layout.tile_grid == (0, 0):
        return [_resize(picture, sizes[0], rules.resample)]
    rows, columns = layout.tile_grid
    if rules.kind == "square":
        return [
            _resize(each, sizes[0], rules.resample) for each in (picture, *_crops(picture, rows, columns))
        ]
    whole = _resize(picture, (rows * rules.tile, columns * rules.tile), rules.resample)
    tiles = _cut(whole, layout, rules.tile)
    thumbnail = len(sizes) > rows * columns
    return [*tiles, _resize(picture, sizes[-1], rules.resample)] if thumbnail else tiles


def _resize(picture: Image, size: tuple[int, int], resample: int) -> Image:
    """Resize to (height, width)."""
    return picture.resize((size[1], size[0]), Resampling(resample))


def _cut(picture: Image, layout: ImageLayout, side: int) -> list[Image]:
    rows, columns = layout.tile_grid
    return [
        picture.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
        for row in range(rows)
        for column in range(columns)
    ]


def _crops(picture: Image, rows: int, columns: int) -> list[Image]:
    """Return crops of equal size; the last one of a row or column may be smaller (Gemma 3)."""
    tall, wide = -(-picture.height // rows), -(-picture.width // columns)
    return [
        picture.crop((left, top, min(left + wide, picture.width), min(top + tall, picture.height)))
        for top in range(0, rows * tall, tall)
        for left in range(0, columns * wide, wide)
    ]
