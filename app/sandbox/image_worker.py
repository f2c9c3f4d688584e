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
from llmbox.engine.model_config.vision.shape import (
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
    picture = decode(data, most_pixels)
    try:
        layout = lay_out_image(vision, *picture.size, low_detail=low)
    except ImageSizeError as error:
        raise ImageError(str(error)) from None
    if (size := sum(height * width for height, width in layout.tiles)) > most_pixels:
        raise ImageError(f"this model resizes it to {size:,} pixels, more than {most_pixels:,}")
    tiles = make_tiles(picture, vision, layout)
    if [(tile.height, tile.width) for tile in tiles] != list(layout.tiles):
        raise ImageError("its tiles have other sizes than expected")
    pixels = b"".join(tile.tobytes() for tile in tiles)
    return {
        "tiles": layout.tiles,
        "grid": layout.grid,
        "num_rows": layout.num_rows,
        "text": layout.text,
        "hashes": list(_hashes(pixels, vision, layout)),
        "size": picture.size,
        ATTACHED: pixels,
    }


def decode(data: bytes, most_pixels: int) -> Image.Image:
    """Return the first frame in RGB, turned as its EXIF data say. Raises ImageError."""
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError("it is not a PNG, JPEG, WebP or GIF") from None
    width, height = picture.size
    if width * height > most_pixels:
        raise ImageError(
            f"it has {width:,} x {height:,} pixels, more than {most_pixels:,} in all (limits.image_pixels)"
        )
    picture.load()
    return to_rgb(turn(picture))


def turn(picture: Image.Image) -> Image.Image:
    """Return the image as its EXIF data turn it. Damaged data turn nothing: other viewers show it too."""
    try:
        method = _TURNS.get(picture.getexif().get(ExifTags.Base.Orientation))
    except Exception:  # noqa: BLE001 - Pillow raises whatever its parser of TIFF meets
        return picture
    return picture if method is None else picture.transpose(method)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Convert to RGB: 16 bits to 8, and what is transparent over white."""
    if picture.mode in _16_BIT:
        picture = picture.convert("I")
    if picture.mode == "I":
        return picture.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if picture.mode in _TRANSPARENT or "transparency" in picture.info:
        colors = picture.convert("RGBA")
        white = Image.new("RGBA", colors.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colors).convert("RGB")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def content_hash(pixels: bytes, vision: VisionConfig, layout: ImageLayout) -> str:
    """Return the digest of the pixels and of everything that decides their embeddings beside the weights."""
    facts = [_VERSION, vision.family, asdict(vision.processor), layout.tiles, layout.grid, layout.tile_grid]
    return hashlib.sha256(json.dumps(facts).encode() + b"\0" + pixels).hexdigest()


def _hashes(pixels: bytes, vision: VisionConfig, layout: ImageLayout) -> Iterator[str]:
    """Yield the hash of each image that the engine makes of this one: of all, or of its crops."""
    if layout.pictures == 1:
        yield content_hash(pixels, vision, layout)
        return
    share, size = len(layout.tiles) // layout.pictures, len(pixels) // layout.pictures
    one = replace(layout, tiles=layout.tiles[:share], tile_grid=(0, 0), pictures=1)
    for start in range(0, len(pixels), size):
        yield content_hash(pixels[start : start + size], vision, one)


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


def make_tiles(picture: Image.Image, vision: VisionConfig, layout: ImageLayout) -> list[Image.Image]:
    """Return the tiles of the layout, in RGB. `picture`: in RGB, of the size that was laid out."""
    rules, sizes = vision.processor, layout.tiles
    if rules.kind == "tiles":
        rules = replace(rules, splits=layout.tile_grid != (0, 0))
        (first, second), _, _ = tiles_of(rules, *picture.size)
        whole = _resize(_resize(picture, first, rules.resample), second, rules.resample)
        if not rules.splits:
            return [whole]
        return [*_cut(whole, layout, rules.tile), _resize(whole, sizes[-1], rules.resample)]
    if rules.kind == "padded_canvas":
        return _padded_tiles(picture, vision, layout)
    if rules.kind == "center_crop":
        return [_center_crop(picture, rules)]
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


def _padded_tiles(picture: Image.Image, vision: VisionConfig, layout: ImageLayout) -> list[Image.Image]:
    """Return tiles of the picture in the corner of a black canvas, and the whole picture after several."""
    rules = replace(vision.processor, splits=layout.tile_grid != (0, 0))
    rows, columns = padded_canvas(rules, *picture.size)
    size = _padded_size(picture, rows * rules.tile, columns * rules.tile, rules.tile)
    canvas = Image.new("RGB", (columns * rules.tile, rows * rules.tile))
    canvas.paste(_resize(picture, size, rules.resample))
    if not rules.splits:
        return [canvas]
    return [*_cut(canvas, layout, rules.tile), _resize(picture, layout.tiles[-1], rules.resample)]


def _padded_size(picture: Image.Image, tall: int, wide: int, tile: int) -> tuple[int, int]:
    """Return (height, width) of a picture on a canvas of `tall` x `wide` pixels; none grows beyond a tile."""
    width, height = picture.size
    high, broad = min(max(height, tile), tall), min(max(width, tile), wide)
    # Llama 4's processor computes in float32 where the canvas limits an edge.
    of_height = float32 if tall < max(height, tile) else float
    of_width = float32 if wide < max(width, tile) else float
    down, across = of_height(high / height), of_width(broad / width)
    both = float32 if float32 in (of_height, of_width) else float
    if both(across) < both(down):
        return max(1, min(math.floor(of_width(height * across)), high)), broad
    return high, max(1, min(math.floor(of_height(width * down)), broad))


def _center_crop(picture: Image.Image, rules: ImageProcessorConfig) -> Image.Image:
    """Resize the shorter edge to the side of a tile, and cut the tile from the middle."""
    side, shorter = rules.tile, min(picture.size)
    width, height = (int(side * edge / shorter) for edge in picture.size)
    resized = _resize(picture, (height, width), rules.resample)
    left, top = (width - side) // 2, (height - side) // 2
    return resized.crop((left, top, left + side, top + side))


def _resize(picture: Image.Image, size: tuple[int, int], resample: int) -> Image.Image:
    """Resize to (height, width)."""
    return picture.resize((size[1], size[0]), Image.Resampling(resample))


def _cut(picture: Image.Image, layout: ImageLayout, side: int) -> list[Image.Image]:
    rows, columns = layout.tile_grid
    return [
        picture.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
        for row in range(rows)
        for column in range(columns)
    ]


def _crops(picture: Image.Image, rows: int, columns: int) -> list[Image.Image]:
    """Return crops of equal size; the last one of a row or column may be smaller (Gemma 3)."""
    tall, wide = -(-picture.height // rows), -(-picture.width // columns)
    return [
        picture.crop((left, top, min(left + wide, picture.width), min(top + tall, picture.height)))
        for top in range(0, rows * tall, tall)
        for left in range(0, columns * wide, wide)
    ]


if __name__ == "__main__":
    Image.MAX_IMAGE_PIXELS = None  # `decode` has a limit of its own
    run_worker("image worker", lambda: answer, MEMORY_BYTES, cpu_seconds=CPU_SECONDS)
