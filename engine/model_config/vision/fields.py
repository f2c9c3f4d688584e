"""Fields of a model's files that families read their vision part from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from ..fields import Fields, show
from .config import VisionActivation, VisionConfig

CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
HALF: Final = (0.5, 0.5, 0.5)
MAX_SIDE: Final = 1 << 14
"""Largest tile, edge or patch in pixels."""
MAX_PIXELS: Final = 1 << 28
MAX_LAYERS: Final = 1024
MAX_WIDTH: Final = 1 << 20
_ACTIVATIONS: Final[dict[str, VisionActivation]] = {
    **{name: name for name in get_args(VisionActivation)},
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFiles:
    """Fields of a model's files that its vision part is read from."""

    model: Fields
    """config.json."""
    tower: Fields
    """Its `vision_config`."""
    processor: Fields
    """Image processor; empty where there is no file of it."""
    tokenizer: Fields
    """tokenizer_config.json; empty where there is none."""
    text: Fields
    """`text_config`, or config.json."""
    hidden_size: int
    """Width of the language model."""


VisionRule = Callable[[VisionFiles], VisionConfig]


def activation_of(fields: Fields, default: str, key: str = "hidden_act") -> VisionActivation:
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise fields.error(f"{key} {show(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def side_of(fields: Fields, key: str, default: int) -> int:
    """Return the side of a square, which files may give as a list of two equal numbers, or an object."""
    value = fields.raw.get(key)
    if isinstance(value, Mapping):
        value = [value.get("height"), value.get("width")]
    if isinstance(value, (list, tuple)):
        if len(set(map(str, value))) != 1:
            raise fields.error(f"{key} {show(value)} is not supported, only squares")
        fields = Fields({key: value[0]}, fields.where)
    return fields.integer(key, default, most=MAX_SIDE)


def sizes_of(
    fields: Fields,
    *,
    width: int,
    inner: int,
    layers: int,
    heads: int = 16,
    patch: int = 14,
    keys: tuple[str, str, str] = ("hidden_size", "num_hidden_layers", "num_attention_heads"),
) -> dict[str, Any]:
    """Return the sizes that all towers have, from `keys` and their defaults in transformers."""
    hidden = fields.integer(keys[0], width, most=MAX_WIDTH)
    count = fields.integer(keys[1], layers, most=MAX_LAYERS)
    num_heads = fields.integer(keys[2], heads, most=MAX_WIDTH)
    head_dim = hidden // num_heads
    if head_dim * num_heads != hidden:
        raise fields.error(f"{keys[0]} {hidden} is not a multiple of {keys[2]} {num_heads}")
    if fields.integer("num_channels", 3) != 3 or fields.integer("in_channels", 3) != 3:
        raise fields.error("pictures of other than 3 colors are not supported")
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", inner, most=16 * MAX_WIDTH),
        "num_layers": count,
        "stored_layers": count,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "patch_size": side_of(fields, "patch_size", patch),
    }


def rope_theta(fields: Fields, default: float = 10000.0) -> float:
    rope = Fields(fields.mapping("rope_parameters") or {}, fields.where)
    theta = rope.number("rope_theta", fields.number("rope_theta", default))
    if rope.text("rope_type", "axial") not in {"axial", "default"} or not 1.0 < theta <= 1e15:
        raise fields.error(f"rope_parameters {show(dict(rope.raw))} are not supported for pictures")
    return theta


def pixels_of(
    files: VisionFiles, mean: tuple[float, ...], std: tuple[float, ...], resample: int
) -> dict[str, Any]:
    """Return normalization and filter of the image processor. Raises ModelError."""
    fields = files.processor
    for key in ("do_resize", "do_rescale"):
        if not fields.flag(key, default=True):
            raise fields.error(f"{key} false is not supported")
    normalizes = fields.flag("do_normalize", default=True)
    mean = fields.numbers("image_mean") or mean if normalizes else (0.0, 0.0, 0.0)
    std = fields.numbers("image_std") or std if normalizes else (1.0, 1.0, 1.0)
    scale = fields.number("rescale_factor", 1 / 255)
    if len(mean) != 3 or len(std) != 3 or not all(each > 0 for each in std) or not 0 < scale <= 1:
        raise fields.error("image_mean and image_std must have 3 numbers each, std above 0")
    number = fields.raw.get("resample")
    if number is not None and (not isinstance(number, int) or number not in range(6)):
        raise fields.error(f"resample must be the number of a filter of Pillow, 0 to 5, not {show(number)}")
    return {
        "mean": mean,
        "std": std,
        "rescale": scale,
        "resample": resample if number is None else number,
    }


def size_of(fields: Fields, key: str, names: tuple[str, ...], default: int, most: int) -> int:
    """Return a number of the object `key`, under one of its names."""
    size = Fields(fields.mapping(key) or {}, f"{fields.where}: {key}")
    for name in names:
        if size.raw.get(name) is not None:
            return size.integer(name, most=most)
    return default


def token_text(files: VisionFiles, key: str, default: str) -> str:
    """Return the text of a special token from tokenizer_config.json."""
    value = files.tokenizer.raw.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else default


def token_id(files: VisionFiles, default: int, *keys: str) -> int:
    for key in keys:
        if files.model.raw.get(key) is not None:
            return files.model.integer(key)
    return default


def feature_layer(files: VisionFiles, count: int, key: str = "vision_feature_layer") -> int:
    """Return how many layers are run for the states that the projector reads."""
    value = files.model.raw.get(key, -1)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not -count <= value <= count:
        raise files.model.error(f"{key} {show(value)} is not supported, only one of {count} layers")
    return value if value >= 0 else count + 1 + value
