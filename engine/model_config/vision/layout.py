"""Layout of images: what an image processor makes of one of W x H pixels, its tiles, rows and text.

The rules of images are those of the processors in transformers, so that a model sees what it knows.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from .config import ImageLayout, ImageProcessorConfig, ResizeKind, VisionConfig

LARGEST_EDGE: Final = 4096
"""Longest edge of Idefics3's first resize."""
MOST_RATIO: Final = 200
"""Ratio of the edges from which on Qwen's and GLM's processors refuse an image."""


class ImageSizeError(ValueError):
    """Image of a size that a model's image processor does not take."""


def lay_out_image(vision: VisionConfig, width: int, height: int, *, low_detail: bool = False) -> ImageLayout:
    """Return tiles, rows and text of an image of this size, in pixels after its EXIF turn.

    `low_detail`: without tiles, and of about 512 x 512 pixels where sizes vary. Raises ImageSizeError.
    """
    if low_detail:
        vision = replace(vision, processor=vision.processor.at_low_detail())
    if width < 1 or height < 1:
        raise ImageSizeError(f"an image of {width} x {height} pixels has none")
    processor, side = vision.processor, vision.processor.unit
    if (rule := _LAYOUTS.get(processor.kind)) is not None:
        return rule(vision, width, height)
    tall, wide = resized(processor, width, height)
    rows, columns = tall // side, wide // side
    text = vision.start + vision.line_end.join([vision.image_text * columns] * rows) + vision.end
    if (crops := crops_of(processor, width, height)) != (0, 0):
        return _crops_layout(text, (tall, wide), (rows, columns), crops)
    return ImageLayout(tiles=((tall, wide),), num_rows=rows * columns, text=text, grid=(rows, columns))


def resized(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return (height, width) of the whole image after its resize. Raises ImageSizeError."""
    match processor.kind:
        case "square":
            return processor.tile, processor.tile
        case "center_crop":
            _refuse_ratio(width, height)
            return processor.tile, processor.tile
        case "longest_edge":
            return _longest_edge_size(processor, width, height)
        case "gemma4":
            return _gemma4_size(processor, width, height)
        case "glm":
            return _glm_size(processor, width, height)
        case "whole_units":
            return _whole_units_size(processor, width, height)
        case "padded_units":
            tall, wide = processor.unpadded_size(width, height)
            return -(-tall // processor.unit) * processor.unit, -(-wide // processor.unit) * processor.unit
        case "lfm2":
            return _limited_size(processor, width, height, at_least=True)
        case _:
            _refuse_ratio(width, height)
            return _limited_size(processor, width, height)


def crops_of(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of Gemma 3's crops (pan and scan); zeros where there are none."""
    longer, shorter = max(width, height), min(width, height)
    if not processor.splits or not processor.crop or longer / shorter < processor.tolerance:
        return 0, 0
    count = min(longer // processor.crop, math.floor(longer / shorter + 0.5))
    count = min(processor.tile_counts[1], max(2, count))
    edge = math.ceil(longer / count)
    if min(edge, shorter) < processor.crop or edge * (count - 1) >= longer:
        return 0, 0
    return (1, count) if width >= height else (count, 1)


def _crops_layout(
    text: str, size: tuple[int, int], grid: tuple[int, int], crops: tuple[int, int]
) -> ImageLayout:
    """Return the layout of a whole image and its crops, each of `size` and with this text."""
    count = crops[0] * crops[1]
    each = " ".join([text] * count)
    return ImageLayout(
        tiles=(size,) * (count + 1),
        num_rows=grid[0] * grid[1] * (count + 1),
        text=f"Here is the original image {text} and here are some crops to help you see better {each}",
        grid=grid,
        tile_grid=crops,
        images=count + 1,
    )


def _longest_edge_size(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Shrink until no edge is longer than the longest; sizes grow to whole units (Pixtral)."""
    ratio = max(height, width) / processor.longest
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    if not width or not height:
        raise ImageSizeError(
            "the image is too thin: nothing is left of its shorter edge once the longer one has "
            f"{processor.longest} pixels; cut it into pieces"
        )
    unit = processor.unit
    return -(-height // unit) * unit, -(-width // unit) * unit


def _refuse_ratio(width: int, height: int) -> None:
    if max(height, width) / min(height, width) > MOST_RATIO:
        raise ImageSizeError(
            f"an image of {width} x {height} pixels is too long: this model takes at most {MOST_RATIO} "
            "times as many pixels along one edge as along the other; cut it into pieces"
        )


def _limited_size(
    processor: ImageProcessorConfig, width: int, height: int, *, at_least: bool = False, frames: int = 1
) -> tuple[int, int]:
    """Return whole units whose pixels are between `least` and `most` (Qwen2-VL)."""
    unit = processor.unit
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if at_least:
        tall, wide = max(unit, tall), max(unit, wide)
    if frames * tall * wide > processor.most:
        beta = math.sqrt(frames * height * width / processor.most)
        tall = max(unit, math.floor(height / beta / unit) * unit)
        wide = max(unit, math.floor(width / beta / unit) * unit)
    elif frames * tall * wide < processor.least:
        beta = math.sqrt(processor.least / (frames * height * width))
        tall, wide = math.ceil(height * beta / unit) * unit, math.ceil(width * beta / unit) * unit
    return tall, wide


def _glm_size(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Enlarge to one unit first; an image counts as two frames (GLM)."""
    unit = processor.unit
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    _refuse_ratio(width, height)
    return _limited_size(processor, width, height, frames=2)


def _whole_units_size(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Enlarge each edge to one unit first (PaddleOCR-VL)."""
    unit = processor.unit
    if height < unit:
        width, height = round(width * unit / height), unit
    if width < unit:
        width, height = unit, round(height * unit / width)
    _refuse_ratio(width, height)
    return _limited_size(processor, width, height)


def _gemma4_size(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return the largest size in whole units within `most` pixels that keeps the ratio of the edges."""
    unit, most = processor.unit, processor.most
    factor = math.sqrt(most / (height * width))
    tall = math.floor(factor * height / unit) * unit
    wide = math.floor(factor * width / unit) * unit
    longest = most // unit**2 * unit
    if not tall:
        return unit, min(width // height * unit, longest)
    if not wide:
        return min(height // width * unit, longest), unit
    return tall, wide


def tiles_of(
    processor: ImageProcessorConfig, width: int, height: int
) -> tuple[list[tuple[int, int]], int, int]:
    """Return Idefics3's two sizes (height, width) of the whole image, one after the other, and its rows and
    columns of tiles; none where one tile has all of it.
    """
    ratio, edge = width / height, processor.longest
    if width >= height:
        tall, wide = int(edge / ratio), edge
        tall += tall % 2
    else:
        tall, wide = edge, int(edge * ratio)
        wide += wide % 2
    tall, wide = max(tall, 1), max(wide, 1)
    ratio = wide / tall
    if max(tall, wide) > LARGEST_EDGE:
        is_wide = wide >= tall
        tall = int(LARGEST_EDGE / ratio) if is_wide else LARGEST_EDGE
        wide = LARGEST_EDGE if is_wide else int(LARGEST_EDGE * ratio)
    first, tile = (max(tall, 1), max(wide, 1)), processor.tile
    if not processor.splits:
        return [first, (tile, tile)], 0, 0
    tall, wide = first
    ratio = wide / tall
    if wide >= tall:
        wide = math.ceil(wide / tile) * tile
        tall = math.ceil(int(wide / ratio) / tile) * tile
    else:
        tall = math.ceil(tall / tile) * tile
        wide = math.ceil(int(tall * ratio) / tile) * tile
    sizes = [first, (max(tall, 1), max(wide, 1))]
    if max(tall, wide) <= tile:
        return sizes, 0, 0
    return sizes, (tall - tile) // tile + 1, (wide - tile) // tile + 1


def _idefics3_layout(vision: VisionConfig, width: int, height: int) -> ImageLayout:
    _, rows, columns = tiles_of(vision.processor, width, height)
    tile, tower = vision.processor.tile, vision.tower
    each = (tile // tower.patch_size // tower.merge) ** 2
    tokens, edge = vision.image_text * each, vision.start
    parts = [
        "".join(f"{edge}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    ]
    text = "".join(parts) + ("\n" if rows else "") + f"{edge}<global-img>{tokens}{edge}"
    count = rows * columns + 1
    return ImageLayout(
        tiles=((tile, tile),) * count, num_rows=count * each, text=text, tile_grid=(rows, columns)
    )


def lfm2_tiles(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of tiles of LFM2-VL; zeros where the image is not cut."""
    unit = processor.unit
    # The lower limit is half a unit, which is one patch.
    sides = [max(processor.unit // 2, round(edge / unit) * unit) for edge in (height, width)]
    is_large = sides[0] * sides[1] > processor.most * processor.tolerance
    return closest_tiles(processor, width, height) if is_large and processor.splits else (0, 0)


def closest_tiles(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of the canvas of tiles whose ratio is closest to the image's. Of equally
    close ones that with more tiles is taken, unless it has more than twice the image's pixels.
    """
    least, most = processor.tile_counts
    sides = range(1, most + 1)
    ratios = [(wide, tall) for wide in sides for tall in sides if least <= wide * tall <= most]
    best, nearest = (1, 1), math.inf
    for ratio in sorted(ratios, key=lambda ratio: ratio[0] * ratio[1]):
        distance = abs(width / height - ratio[0] / ratio[1])
        if distance < nearest:
            nearest, best = distance, ratio
        elif distance == nearest and width * height > 0.5 * processor.tile**2 * ratio[0] * ratio[1]:
            best = ratio
    return best[1], best[0]


def _canvas_layout(vision: VisionConfig, width: int, height: int) -> ImageLayout:
    """Return equal tiles and, after several, the whole image in the size of one (InternVL)."""
    processor, tower = vision.processor, vision.tower
    grid_of = padded_canvas if processor.kind == "fitted_canvas" else closest_tiles
    rows, columns = grid_of(processor, width, height) if processor.splits else (1, 1)
    count = 1 if rows * columns == 1 else rows * columns + 1
    each = (processor.tile // tower.patch_size // tower.merge) ** 2
    (before, after), tokens = vision.tile_marks or ("", ""), vision.image_text * each
    names = [*range(1, count), "GLOBAL"] if before else [""] * count
    return ImageLayout(
        tiles=((processor.tile,) * 2,) * count,
        num_rows=count * each,
        text=vision.start + "".join(f"{before}{name}{tokens}{after}" for name in names) + vision.end,
        tile_grid=(rows, columns) if count > 1 else (0, 0),
    )


def _lfm2_layout(vision: VisionConfig, width: int, height: int) -> ImageLayout:
    processor, token = vision.processor, vision.image_text
    rows, columns = lfm2_tiles(processor, width, height)
    whole, side = resized(processor, width, height), processor.unit
    of_whole, of_tile = (whole[0] // side) * (whole[1] // side), (processor.tile // side) ** 2
    count, tile = rows * columns, (processor.tile, processor.tile)
    if count <= 1:
        only, each = (tile, of_tile) if rows else (whole, of_whole)  # a single tile has no thumbnail
        text = vision.start + token * each + vision.end
        return ImageLayout(tiles=(only,), num_rows=each, text=text, tile_grid=(rows, columns))
    text = "".join(
        f"<|img_row_{row}_col_{column}|>{token * of_tile}"
        for row in range(1, rows + 1)
        for column in range(1, columns + 1)
    )
    tiles, num_rows = (tile,) * count, count * of_tile
    if processor.thumbnail:
        text = f"{text}<|img_thumbnail|>{token * of_whole}"
        tiles, num_rows = (*tiles, whole), num_rows + of_whole
    text = vision.start + text + vision.end
    return ImageLayout(tiles=tiles, num_rows=num_rows, text=text, tile_grid=(rows, columns))


def _slice_grid(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of the slices of MiniCPM-V, whose ratio is closest to the image's; zeros where
    it is not cut.
    """
    most = processor.tile_counts[1]
    count = min(math.ceil(width * height / processor.tile**2), most)
    if not processor.splits or count <= 1:
        return 0, 0
    ratio, nearest, best = math.log(width / height), math.inf, (1, 1)
    for slices in range(count - 1, count + 2):
        if slices == 1 or slices > most:
            continue
        for rows in (each for each in range(1, slices + 1) if slices % each == 0):
            distance = abs(ratio - math.log(slices // rows / rows))
            if distance < nearest or (distance == nearest and rows > best[0]):
                nearest, best = distance, (rows, slices // rows)
    return best


def _slice_size(
    processor: ImageProcessorConfig, width: float, height: float, *, enlarges: bool
) -> tuple[int, int]:
    """Return (height, width) in whole units of an image or slice that has about as many pixels as a tile."""
    tile, unit = processor.tile, processor.unit
    if enlarges or width * height > tile**2:
        ratio = width / height
        height = int(tile / math.sqrt(ratio))
        width = int(height * ratio)
    return max(round(height / unit) * unit, unit), max(round(width / unit) * unit, unit)


def _slices_layout(vision: VisionConfig, width: int, height: int) -> ImageLayout:
    """Return the whole image and then, of a large one, its slices (MiniCPM-V)."""
    processor, token = vision.processor, vision.image_text
    _refuse_ratio(width, height)
    rows, columns = _slice_grid(processor, width, height)
    count = rows * columns
    tiles = [_slice_size(processor, width, height, enlarges=count == 0)]
    if count:
        wide, tall = (max(round(edge / n), 1) for edge, n in ((width, columns), (height, rows)))
        tiles += [_slice_size(processor, wide, tall, enlarges=True)] * count
    lengths = [tall * wide // processor.unit**2 for tall, wide in tiles]
    before, after = vision.tile_marks
    line = f"{before}{token * lengths[-1]}{after}" * columns
    return ImageLayout(
        tiles=tuple(tiles),
        num_rows=sum(lengths),
        text=f"{vision.start}{token * lengths[0]}{vision.end}" + "\n".join([line] * rows),
        tile_grid=(rows, columns),
    )


def padded_canvas(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of the canvas that enlarges an image least, or else shrinks it least, and of
    several the smallest. Llama 4's processor, which pads images, compares scales in float32.
    """
    tile, most = processor.tile, processor.tile_counts[1] if processor.splits else 1
    is_padded = processor.kind == "padded_canvas"
    shapes = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    shapes.sort(key=lambda shape: (math.prod(shape), shape[0 if is_padded else 1]))
    number = float32 if is_padded else float
    scales = [number(min(columns * tile / width, rows * tile / height)) for rows, columns in shapes]
    larger = [scale for scale in scales if scale >= 1]
    return shapes[scales.index(min(larger) if larger else max(scales))]


def float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _padded_canvas_layout(vision: VisionConfig, width: int, height: int) -> ImageLayout:
    processor, tower = vision.processor, vision.tower
    rows, columns = padded_canvas(processor, width, height)
    each = (processor.tile // tower.patch_size // tower.merge) ** 2
    token, count = vision.image_text * each, rows * columns
    line = "<|tile_x_separator|>".join([token] * columns) + "<|tile_y_separator|>"
    tiles = line * rows if count > 1 else ""
    count += count > 1
    return ImageLayout(
        tiles=((processor.tile, processor.tile),) * count,
        num_rows=count * each,
        text=f"{vision.start}{tiles}{vision.placeholder}{token}{vision.end}",
        tile_grid=(rows, columns) if count > 1 else (0, 0),
    )


def _anyres_layout(vision: VisionConfig, width: int, height: int) -> ImageLayout:
    """Return the whole image in the size of a tile, and then the tiles of its canvas (LLaVA-NeXT)."""
    processor, count, tile_grid, in_lines = vision.processor, 1, (0, 0), 1
    if processor.splits:
        tall, wide = processor.canvas_of(width, height)
        tile_grid = tall // processor.tile, wide // processor.tile
        rows, columns = processor.canvas_patches(width, height)[1]
        count, in_lines = 1 + tile_grid[0] * tile_grid[1], rows * (columns + 1)
    num_rows = (processor.tile // processor.unit) ** 2 + in_lines
    tiles, text = ((processor.tile, processor.tile),) * count, vision.image_text * num_rows
    return ImageLayout(tiles=tiles, num_rows=num_rows, text=text, tile_grid=tile_grid)


_LAYOUTS: Final[dict[ResizeKind, Callable[[VisionConfig, int, int], ImageLayout]]] = {
    "tiles": _idefics3_layout,
    "lfm2": _lfm2_layout,
    "canvas": _canvas_layout,
    "fitted_canvas": _canvas_layout,
    "padded_canvas": _padded_canvas_layout,
    "slices": _slices_layout,
    "anyres": _anyres_layout,
}
