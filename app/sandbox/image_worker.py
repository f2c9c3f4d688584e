"""Image worker: decodes and resizes images, `python -P -m llmbox.app.sandbox.image_worker`.

A hostile file may take long or much memory, so the process lives under limits and the daemon may kill it
(`worker.py`). The size in a file's header is checked before anything is decoded. Resizing and tiling are
those of each family's image processor in transformers; where it has two, of the one that needs Pillow alone.

job:    {"vision": JSON of a VisionConfig, "low": bool, "most_pixels": int}, with the file attached
answer: {"tiles", "grid", "num_rows", "text", "hashes", "size"} with RGB pixels attached, or {"error": str}
"""

import hashlib
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any, Final

import msgspec
from PIL import (
    ExifTags,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from llmbox.engine.model_config.vision.config import ImageLayout, ImageProcessorConfig, VisionConfig
from llmbox.engine.model_config.vision.layout import (
    ImageSizeError,
    float32,
    lay_out_image,
    padded_canvas,
    tiles_of,
)

from .worker import ATTACHED, run_worker

MEMORY_BYTES: Final = 1536 << 20
CPU_SECONDS: Final = 8.0
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_PLUGINS: Final = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin)
"""Imported before the limits are set: no file is opened later."""
_TRANSPARENT: Final = ("RGBA", "RGBa", "LA", "La", "PA")
_16_BIT: Final = ("I;16", "I;16B", "I;16L", "I;16N")
_TURNS: Final[dict[Any, Image.Transpose]] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Turn for each value of EXIF's orientation."""
_VERSION: Final = 1
"""Number to raise where the same file gives other pixels."""


class ImageError(Exception):
    """Image that cannot be used, with the reason."""


def prepare(data: bytes, vision: VisionConfig, *, low: bool, most_pixels: int) -> dict[str, Any]:
    """Return the answer, with the pixels of all tiles. Raises ImageError."""
    image = decode(data, most_pixels)
    try:
        layout = lay_out_image(vision, *image.size, low_detail=low)
    except ImageSizeError as error:
        raise ImageError(str(error)) from None
    if (size := sum(height * width for height, width in layout.tiles)) > most_pixels:
        raise ImageError(f"this model resizes it to {size:,} pixels, more than {most_pixels:,}")
    tiles = make_tiles(image, vision, layout)
    if [(tile.height, tile.width) for tile in tiles] != list(layout.tiles):
        raise ImageError("its tiles have other sizes than expected")
    pixels = b"".join(tile.tobytes() for tile in tiles)
    return {
        "tiles": layout.tiles,
        "grid": layout.grid,
        "num_rows": layout.num_rows,
        "text": layout.text,
        "hashes": list(_hashes(pixels, vision, layout, image.size)),
        "size": image.size,
        ATTACHED: pixels,
    }


def decode(data: bytes, most_pixels: int) -> Image.Image:
    """Return the first frame in RGB, turned as its EXIF data say. Raises ImageError."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError("it is not a PNG, JPEG, WebP or GIF") from None
    width, height = image.size
    if width * height > most_pixels:
        raise ImageError(
            f"it has {width:,} x {height:,} pixels, more than {most_pixels:,} in all (limits.image_pixels)"
        )
    image.load()
    return to_rgb(turn(image))


def turn(image: Image.Image) -> Image.Image:
    """Return the image as its EXIF data turn it. Damaged data turn nothing: other viewers show it too."""
    try:
        method = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # noqa: BLE001 - Pillow raises whatever its parser of TIFF meets
        return image
    return image if method is None else image.transpose(method)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: 16 bits to 8, and what is transparent over white."""
    if image.mode in _16_BIT:
        image = image.convert("I")
    if image.mode == "I":
        return image.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        colors = image.convert("RGBA")
        white = Image.new("RGBA", colors.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colors).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def content_hash(
    pixels: bytes, vision: VisionConfig, layout: ImageLayout, size: tuple[int, int] = (0, 0)
) -> str:
    """Return the digest of the pixels and of everything that decides their embeddings beside the weights.

    `size`: width and height of the image.
    """
    facts = [_VERSION, vision.family, asdict(vision.processor), layout.tiles, layout.grid, layout.tile_grid]
    if vision.processor.kind == "anyres":  # the ratio of edges decides which rows are padding
        facts.append(size)
    return hashlib.sha256(json.dumps(facts).encode() + b"\0" + pixels).hexdigest()


def _hashes(pixels: bytes, vision: VisionConfig, layout: ImageLayout, size: tuple[int, int]) -> Iterator[str]:
    """Yield the hash of each image that the engine makes of this one: of all, or of its crops."""
    if layout.images == 1:
        yield content_hash(pixels, vision, layout, size)
        return
    share, length = len(layout.tiles) // layout.images, len(pixels) // layout.images
    one = replace(layout, tiles=layout.tiles[:share], tile_grid=(0, 0), images=1)
    for start in range(0, len(pixels), length):
        yield content_hash(pixels[start : start + length], vision, one)


@lru_cache(maxsize=4)
def _vision(text: str) -> VisionConfig:
    return msgspec.json.decode(text, type=VisionConfig)


def answer(message: dict[str, Any]) -> dict[str, Any]:
    try:
        vision, low = _vision(message["vision"]), message["low"]
        return prepare(message[ATTACHED], vision, low=low, most_pixels=message["most_pixels"])
    except ImageError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES >> 20} MB of memory"}
    except Exception as error:  # noqa: BLE001 - whatever a file does wrong is an answer, not a crash
        return {"error": f"it cannot be decoded: {(str(error) or type(error).__name__)[:200]}"}


def make_tiles(image: Image.Image, vision: VisionConfig, layout: ImageLayout) -> list[Image.Image]:
    """Return the tiles of the layout, in RGB. `image`: in RGB, of the size that was laid out."""
    rules, sizes = vision.processor, layout.tiles
    if rules.kind == "tiles":
        rules = replace(rules, splits=layout.tile_grid != (0, 0))
        (first, second), _, _ = tiles_of(rules, *image.size)
        whole = _resize(_resize(image, first, rules.resample), second, rules.resample)
        if not rules.splits:
            return [whole]
        return [*_cut(whole, layout, rules.tile, rules.tile), _resize(whole, sizes[-1], rules.resample)]
    if rules.kind == "padded_canvas":
        return _padded_tiles(image, vision, layout)
    if rules.kind == "slices":
        return _slices(image, rules, layout)
    if rules.kind == "anyres":
        return _canvas_tiles(image, rules, layout)
    if rules.kind == "padded_units":
        canvas = Image.new("RGB", sizes[0][::-1])
        canvas.paste(_resize(image, rules.unpadded_size(*image.size), rules.resample))
        return [canvas]
    if rules.kind == "center_crop":
        return [_center_crop(image, rules)]
    if layout.tile_grid == (0, 0):
        return [_resize(image, sizes[0], rules.resample)]
    rows, columns = layout.tile_grid
    if rules.kind == "square":
        return [_resize(each, sizes[0], rules.resample) for each in (image, *_crops(image, rows, columns))]
    whole = _resize(image, (rows * rules.tile, columns * rules.tile), rules.resample)
    tiles = _cut(whole, layout, rules.tile, rules.tile)
    if len(sizes) == rows * columns:
        return tiles
    thumbnail = _resize(image, sizes[-1], rules.resample)
    return [thumbnail, *tiles] if rules.kind == "covered_canvas" else [*tiles, thumbnail]


def _padded_tiles(image: Image.Image, vision: VisionConfig, layout: ImageLayout) -> list[Image.Image]:
    """Return tiles of the image in the corner of a black canvas, and the whole image after several."""
    rules = replace(vision.processor, splits=layout.tile_grid != (0, 0))
    rows, columns = padded_canvas(rules, *image.size)
    size = _padded_size(image, rows * rules.tile, columns * rules.tile, rules.tile)
    canvas = Image.new("RGB", (columns * rules.tile, rows * rules.tile))
    canvas.paste(_resize(image, size, rules.resample))
    if not rules.splits:
        return [canvas]
    return [*_cut(canvas, layout, rules.tile, rules.tile), _resize(image, layout.tiles[-1], rules.resample)]


def _padded_size(image: Image.Image, tall: int, wide: int, tile: int) -> tuple[int, int]:
    """Return (height, width) of an image on a canvas of `tall` x `wide` pixels; none grows beyond a tile."""
    width, height = image.size
    high, broad = min(max(height, tile), tall), min(max(width, tile), wide)
    # Llama 4's processor computes in float32 where the canvas limits an edge.
    of_height = float32 if tall < max(height, tile) else float
    of_width = float32 if wide < max(width, tile) else float
    down, across = of_height(high / height), of_width(broad / width)
    both = float32 if float32 in (of_height, of_width) else float
    if both(across) < both(down):
        return max(1, min(math.floor(of_width(height * across)), high)), broad
    return high, max(1, min(math.floor(of_height(width * down)), broad))


def _slices(image: Image.Image, rules: ImageProcessorConfig, layout: ImageLayout) -> list[Image.Image]:
    """Return the whole image, and its slices from a larger one (MiniCPM-V)."""
    (whole, *slices), (rows, columns) = layout.tiles, layout.tile_grid
    tiles = [_resize(image, whole, rules.resample)]
    if slices:
        tall, wide = slices[0]
        tiles += _cut(_resize(image, (rows * tall, columns * wide), rules.resample), layout, tall, wide)
    return tiles


def _canvas_tiles(image: Image.Image, rules: ImageProcessorConfig, layout: ImageLayout) -> list[Image.Image]:
    """Return the whole image, and the tiles of it in the middle of a black canvas (LLaVA-NeXT)."""
    tiles = [_resize(image, layout.tiles[0], rules.resample)]
    if layout.tile_grid == (0, 0):
        return tiles
    tall, wide = (count * rules.tile for count in layout.tile_grid)
    across, down = wide / image.width, tall / image.height
    high, broad = min(math.ceil(image.height * across), tall), min(math.ceil(image.width * down), wide)
    size = (high, wide) if across < down else (tall, broad)
    canvas = Image.new("RGB", (wide, tall))
    canvas.paste(_resize(image, size, rules.resample), ((wide - size[1]) // 2, (tall - size[0]) // 2))
    return [*tiles, *_cut(canvas, layout, rules.tile, rules.tile)]


def _center_crop(image: Image.Image, rules: ImageProcessorConfig) -> Image.Image:
    """Resize the shorter edge to the side of a tile, and cut the tile from the middle."""
    side, shorter = rules.tile, min(image.size)
    width, height = (int(side * edge / shorter) for edge in image.size)
    resized = _resize(image, (height, width), rules.resample)
    left, top = (width - side) // 2, (height - side) // 2
    return resized.crop((left, top, left + side, top + side))


def _resize(image: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """Resize to (height, width)."""
    return image.resize((size[1], size[0]), Image.Resampling(resample))


def _cut(image: Image.Image, layout: ImageLayout, tall: int, wide: int) -> list[Image.Image]:
    rows, columns = layout.tile_grid
    return [
        image.crop((column * wide, row * tall, (column + 1) * wide, (row + 1) * tall))
        for row in range(rows)
        for column in range(columns)
    ]


def _crops(image: Image.Image, rows: int, columns: int) -> list[Image.Image]:
    """Return crops of equal size; the last one of a row or column may be smaller (Gemma 3)."""
    tall, wide = -(-image.height // rows), -(-image.width // columns)
    return [
        image.crop((left, top, min(left + wide, image.width), min(top + tall, image.height)))
        for top in range(0, rows * tall, tall)
        for left in range(0, columns * wide, wide)
    ]


if __name__ == "__main__":
    Image.MAX_IMAGE_PIXELS = None  # `decode` checks its own limit
    run_worker("image worker", lambda: answer, MEMORY_BYTES, cpu_seconds=CPU_SECONDS)
