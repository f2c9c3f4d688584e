"""Layout of images: what an image processor makes of one of W x H pixels, its tiles, rows and text.

The rules of images are those of the processors in transformers, so that a model sees what it knows.
"""

import math
import struct
from dataclasses import replace
from typing import Final

from .config import ImageLayout, ImageProcessorConfig, TileText, VisionConfig

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
    if processor.kind == "anyres":
        return _anyres_layout(vision, width, height)
    if vision.tile_text is not None:
        return _tiled_layout(vision, vision.tile_text, width, height)
    tall, wide = resized(processor, width, height)
    rows, columns = tall // side, wide // side
    text = vision.start + vision.line_end.join([vision.image_text * columns] * rows) + vision.end
    return ImageLayout(tiles=((tall, wide),), num_rows=rows * columns, text=text, grid=(rows, columns))


def _tiled_layout(vision: VisionConfig, texts: TileText, width: int, height: int) -> ImageLayout:
    """Return the layout of an image that may be cut into tiles, with the whole of it before or after them."""
    processor, unit = vision.processor, vision.processor.unit
    rows, columns = grid = grid_of(processor, width, height)
    tile, whole = _tile_sizes(processor, width, height, grid)
    # Pixels at the edge of a tile that is not of whole units are left out.
    of_tile, of_whole = ((tall // unit) * (wide // unit) for tall, wide in (tile, whole))
    whole_grid = (whole[0] // unit, whole[1] // unit) if processor.kind == "square" else (0, 0)
    count = rows * columns
    if count <= 1:
        text = (texts.single or texts.whole).replace("{tokens}", vision.image_text * of_whole)
        text = f"{vision.start}{text}{vision.end}"
        num_rows = of_whole + 3 * texts.joins_are_rows
        return ImageLayout(tiles=(whole,), num_rows=num_rows, text=text, grid=whole_grid)
    places = [(row + 1, column + 1) for row in range(rows) for column in range(columns)]
    written = [
        texts.tile.replace("{row}", str(row))
        .replace("{column}", str(column))
        .replace("{number}", str(number))
        for number, (row, column) in enumerate(places, 1)
    ]
    lines = [texts.column_join.join(written[start : start + columns]) for start in range(0, count, columns)]
    text = (texts.row_join.join(lines) + texts.tiles_end).replace("{tokens}", vision.image_text * of_tile)
    tiles, num_rows = (tile,) * count, count * of_tile + (count + 2) * texts.joins_are_rows
    if processor.thumbnail:
        one = texts.whole.replace("{tokens}", vision.image_text * of_whole)
        text = one + text if texts.whole_first else text + one
        tiles = (whole, *tiles) if texts.whole_first else (*tiles, whole)
        num_rows += of_whole
    return ImageLayout(
        tiles=tiles,
        num_rows=num_rows,
        text=f"{vision.start}{text}{vision.end}",
        grid=whole_grid,
        tile_grid=grid,
        images=len(tiles) if processor.crop else 1,
    )


def grid_of(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of an image's tiles; one tile or none has all of an image that is not cut."""
    if not processor.splits:
        return 0, 0
    match processor.kind:
        case "square":
            return crops_of(processor, width, height)
        case "tiles":
            return tiles_of(processor, width, height)[1:]
        case "lfm2":
            return lfm2_tiles(processor, width, height)
        case "slices":
            return _slice_grid(processor, width, height)
        case "canvas":
            return closest_tiles(processor, width, height)
        case "covered_canvas":
            return _covering_grid(processor, width, height)
        case _:
            return padded_canvas(processor, width, height)


def _tile_sizes(
    processor: ImageProcessorConfig, width: int, height: int, grid: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (height, width) of a tile and of the whole image beside it, or alone."""
    tile, (rows, columns) = (processor.tile, processor.tile), grid
    match processor.kind:
        case "lfm2" if grid != (1, 1):
            return tile, resized(processor, width, height)
        case "slices":
            _refuse_ratio(width, height)
            wide, tall = (max(round(edge / max(1, n)), 1) for edge, n in ((width, columns), (height, rows)))
            whole = _slice_size(processor, width, height, enlarges=rows == 0)
            return _slice_size(processor, wide, tall, enlarges=True), whole
        case _:
            return tile, tile


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
        case "patch_grid":
            return _patch_grid_size(processor, width, height)
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
    if longer / shorter < processor.tolerance:
        return 0, 0
    count = min(longer // processor.crop, math.floor(longer / shorter + 0.5))
    count = min(processor.tile_counts[1], max(2, count))
    edge = math.ceil(longer / count)
    if min(edge, shorter) < processor.crop or edge * (count - 1) >= longer:
        return 0, 0
    return (1, count) if width >= height else (count, 1)


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


def _patch_grid_size(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return whole units of patches between limits; an edge is rounded up if it then fits (Nemotron)."""
    patch, merge = processor.patch, processor.unit // processor.patch
    least, most = processor.least // patch**2, processor.most // patch**2
    sides = [round(edge / patch + 0.5) for edge in (height, width)]
    scale = min(math.sqrt(most / math.prod(sides)), 1.0)
    sides = [max(1, math.floor(scale * side)) for side in sides]
    if most > least > math.prod(sides):
        scale = math.sqrt(least / math.prod(sides))
        sides = [math.ceil(scale * side) for side in sides]
    for place in (0, 1):
        larger = -(-sides[place] // merge) * merge
        is_small = larger * sides[1 - place] <= most
        sides[place] = larger if is_small else max(merge, sides[place] // merge * merge)
    return sides[0] * patch, sides[1] * patch


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


def lfm2_tiles(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of tiles of LFM2-VL; zeros where the image is not cut."""
    unit = processor.unit
    # The lower limit is half a unit, which is one patch.
    sides = [max(processor.unit // 2, round(edge / unit) * unit) for edge in (height, width)]
    is_large = sides[0] * sides[1] > processor.most * processor.tolerance
    return closest_tiles(processor, width, height) if is_large else (0, 0)


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


def _covering_grid(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of the fewest tiles that keep nine tenths of an image's pixels, or of those
    that keep most. Ovis2 counts the pixels of columns as rows, and the other way around.
    """
    tile, most = processor.tile, processor.tile_counts[1]

    def kept_of(down: int, across: int) -> float:
        tall, wide = height // down, width // across
        talls = [tall] * (down - 1) + [height - tall * (down - 1)]
        wides = [wide] * (across - 1) + [width - wide * (across - 1)]
        longer_shorter = ((max(high, broad), min(high, broad)) for high in talls for broad in wides)
        areas = (
            tile * (short / long * tile) if long > tile else long * short for long, short in longer_shorter
        )
        return sum(areas) / (width * height)

    grids = [(down, across) for down in range(1, most + 1) for across in range(1, most // down + 1)]
    kept = {grid: kept_of(*grid) for grid in sorted(grids, key=math.prod)}
    enough = [grid for grid in kept if kept[grid] > 0.9]
    if enough:
        down, across = min(enough, key=lambda grid: (math.prod(grid), -kept[grid]))
    else:
        down, across = min(kept, key=lambda grid: (-kept[grid], math.prod(grid)))
    return across, down


def _slice_grid(processor: ImageProcessorConfig, width: int, height: int) -> tuple[int, int]:
    """Return rows and columns of the slices of MiniCPM-V, whose ratio is closest to the image's; zeros where
    it is not cut.
    """
    most = processor.tile_counts[1]
    count = min(math.ceil(width * height / processor.tile**2), most)
    if count <= 1:
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
