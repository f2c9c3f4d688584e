"""Fields of a model's files as families of vision towers read them. Methods raise ModelError with the key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from ..fields import MAX_LAYERS, MAX_WIDTH, Fields, raw_rope, show
from .config import MAX_SIDE, ImageProcessorConfig, TowerConfig, VisionActivation, VisionConfig

MAX_PIXELS: Final = 1 << 28
_ACTIVATIONS: Final[dict[str, VisionActivation]] = {
    **{name: name for name in get_args(VisionActivation)},
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "swish": "silu",
}


class VisionFields(Fields):
    """Reader of an object that has sizes of a tower or rules of an image processor."""

    def activation(self, default: str, key: str = "hidden_act") -> VisionActivation:
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise self.error(f"{key} {show(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def side(self, key: str, default: int) -> int:
        """Return the side of a square, which files may give as a list of two equal numbers, or an object."""
        value = self.raw.get(key)
        if isinstance(value, Mapping):
            value = [value.get("height"), value.get("width")]
        if isinstance(value, (list, tuple)):
            if len(set(map(str, value))) != 1:
                raise self.error(f"{key} {show(value)} is not supported, only squares")
            return VisionFields({key: value[0]}, self.where).side(key, default)
        return self.integer(key, default, most=MAX_SIDE)

    def size(self, key: str, names: tuple[str, ...], default: int, most: int) -> int:
        """Return a number of the object `key`, under one of its names."""
        size = Fields(self.mapping(key) or {}, f"{self.where}: {key}")
        for name in names:
            if size.raw.get(name) is not None:
                return size.integer(name, most=most)
        return default

    def sizes(
        self,
        *,
        width: int,
        inner: int,
        layers: int,
        heads: int = 16,
        patch: int = 14,
        keys: tuple[str, str, str] = ("hidden_size", "num_hidden_layers", "num_attention_heads"),
    ) -> dict[str, Any]:
        """Return the sizes that all towers have, from `keys` and their defaults in transformers."""
        hidden = self.integer(keys[0], width, most=MAX_WIDTH)
        count = self.integer(keys[1], layers, most=MAX_LAYERS)
        num_heads = self.integer(keys[2], heads, most=MAX_WIDTH)
        head_dim = hidden // num_heads
        if head_dim * num_heads != hidden:
            raise self.error(f"{keys[0]} {hidden} is not a multiple of {keys[2]} {num_heads}")
        if self.integer("num_channels", 3) != 3 or self.integer("in_channels", 3) != 3:
            raise self.error("images without 3 color channels are not supported")
        return {
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size", inner, most=16 * MAX_WIDTH),
            "num_layers": count,
            "stored_layers": count,
            "num_heads": num_heads,
            "head_dim": head_dim,
            "patch_size": self.side("patch_size", patch),
        }

    def rope_theta(self, default: float = 10000.0) -> float:
        rope = Fields(self.mapping("rope_parameters") or {}, self.where)
        theta = rope.number("rope_theta", self.number("rope_theta", default))
        if rope.text("rope_type", "axial") not in {"axial", "default"} or not 1.0 < theta <= 1e15:
            raise self.error(f"rope_parameters {show(dict(rope.raw))} are not supported for images")
        return theta


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFiles:
    """Fields of a model's files that its vision part is read from."""

    model: VisionFields
    """config.json."""
    tower: VisionFields
    """Its `vision_config`."""
    processor: VisionFields
    """Image processor; empty where there is no file of it."""
    tokenizer: Fields
    """tokenizer_config.json; empty where there is none."""
    text: Fields
    """`text_config`, or config.json."""
    hidden_size: int
    """Width of the language model."""

    def config(self, tower: TowerConfig, processor: ImageProcessorConfig, **values: Any) -> VisionConfig:
        """Return the config of tower and processor with these other `values` of `VisionConfig`."""
        return VisionConfig(hidden_size=self.hidden_size, tower=tower, processor=processor, **values)

    def pixels(self, mean: tuple[float, ...], std: tuple[float, ...], resample: int) -> dict[str, Any]:
        """Return normalization and filter of the image processor, with their defaults."""
        fields = self.processor
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
            raise fields.error(
                f"resample must be the number of a filter of Pillow, 0 to 5, not {show(number)}"
            )
        filter_number = resample if number is None else number
        return {"mean": mean, "std": std, "rescale": scale, "resample": filter_number}

    def token_text(self, key: str, default: str) -> str:
        """Return the text of a special token from tokenizer_config.json, or config.json of a GGUF file."""
        value = self.tokenizer.raw.get(key) or self.model.raw.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        return value if isinstance(value, str) and value else default

    def token_id(self, text: str) -> int:
        """Return the id of a special token by its text in tokenizer_config.json."""
        for number, token in (self.tokenizer.mapping("added_tokens_decoder") or {}).items():
            if isinstance(token, Mapping) and token.get("content") == text and number.isdecimal():
                return int(number)
        raise self.tokenizer.error(f"added_tokens_decoder has no token {show(text)}")

    def image_token(self, default: int, *keys: str) -> int:
        """Return the id of the image token, under one of `keys` of config.json."""
        for key in keys:
            if self.model.raw.get(key) is not None:
                return self.model.integer(key)
        return default

    def feature_layers(self, count: int, default: int = -1) -> tuple[int, ...]:
        """Return after how many layers the projector reads states, which it joins. `default`: as in files."""
        key = "vision_feature_layer"
        value = self.model.raw.get(key, default)
        values = value if isinstance(value, list) and len(value) <= MAX_LAYERS else [value]
        if not values or not all(type(each) is int and -count - 1 <= each <= count for each in values):
            raise self.model.error(f"{key} {show(value)} is not supported, only some of {count} layers")
        return tuple(each if each >= 0 else count + 1 + each for each in values)

    def feature_layer(self, count: int, default: int = -1) -> int:
        """Return how many layers are run for the states that the projector reads."""
        layers = self.feature_layers(count, default)
        if len(layers) > 1:
            raise self.model.error(f"vision_feature_layer {show(list(layers))} is not supported, only one")
        return layers[0]

    def mrope(self, default: tuple[int, ...], *, interleaved: bool) -> dict[str, Any]:
        """Return the sections of M-RoPE, with their defaults."""
        fields = Fields(raw_rope(self.text), self.text.where)
        sections = tuple(int(each) for each in fields.numbers("mrope_section")) or default
        if len(sections) != 3 or min(sections) < 0:
            raise self.text.error(f"mrope_section {show(sections)} must have three numbers")
        return {
            "mrope_section": sections,
            "mrope_interleaved": fields.flag("mrope_interleaved", default=interleaved),
        }


VisionRule = Callable[[VisionFiles], VisionConfig]
