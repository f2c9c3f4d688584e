"""Declarative reader of vision towers: a family is a name for each tensor, and a rule for each field."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Final, get_args

from ..fields import LARGEST, MAX_LAYERS, MAX_WIDTH, Fields, raw_rope, show
from .config import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_SIDE,
    ImageProcessorConfig,
    TowerConfig,
    TowerNames,
    VisionActivation,
    VisionConfig,
)

MAX_PIXELS: Final = 1 << 28
MAX_TILES: Final = 64
"""Most tiles of an image, and the largest side of a square of merged patches."""
_ACTIVATIONS: Final[dict[str, VisionActivation]] = {
    **{name: name for name in get_args(VisionActivation)},
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "swish": "silu",
}


class VisionFields(Fields):
    """Reader of an object that has sizes of a tower or rules of an image processor."""

    def activation(self, key: str, default: str) -> VisionActivation:
        name = self.text(key, default)
        if name not in _ACTIVATIONS:
            raise self.error(f"{key} {show(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def side(self, key: str, default: int, most: int = MAX_SIDE) -> int:
        """Return the side of a square, which files may give as a list of two equal numbers, or an object."""
        value = self.raw.get(key)
        if isinstance(value, Mapping):
            value = [value.get("height"), value.get("width")]
        if isinstance(value, (list, tuple)):
            if len(set(map(str, value))) != 1:
                raise self.error(f"{key} {show(value)} is not supported, only squares")
            return VisionFields({key: value[0]}, self.where).side(key, default, most)
        return self.integer(key, default, most=most)

    def inverse(self, key: str, default: float) -> int:
        """Return the whole number that a ratio is the inverse of."""
        ratio = self.number(key, default)
        if not 0 < ratio <= 1 or abs(round(1 / ratio) * ratio - 1) > 1e-6 or ratio * MAX_TILES < 1:
            raise self.error(f"{key} {ratio} is not supported, only 1, 1/2, 1/3 and so on to 1/{MAX_TILES}")
        return round(1 / ratio)


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
    text: VisionFields
    """`text_config`, or config.json."""
    hidden_size: int
    """Width of the language model."""

    @property
    def rope(self) -> VisionFields:
        """RoPE of the language model."""
        return VisionFields(raw_rope(self.text), self.text.where)

    def find(self, paths: str, place: str) -> tuple[VisionFields, str]:
        """Return the fields and the key of the first path that is present, or of the first one."""
        found = [self._resolve(path, place) for path in paths.split("|")]
        return next(((at, key) for at, key in found if at.raw.get(key) is not None), found[0])

    def _resolve(self, path: str, place: str) -> tuple[VisionFields, str]:
        *objects, key = path.split(".")
        if objects and objects[0] in _PLACES:
            place, *objects = objects
        at: VisionFields = getattr(self, place)
        for name in objects:
            at = VisionFields(at.mapping(name) or {}, f"{at.where}: {name}")
        return at, key

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


_PLACES: Final = ("model", "tower", "processor", "text", "rope")


class FieldReader:
    """Reader of one model's vision part. An attribute is a field, which its rule reads when it is asked for;
    None is what no rule of the family names.
    """

    def __init__(self, rules: Mapping[str, Any], files: VisionFiles) -> None:
        self.rules, self.files = {**_USUAL, **rules}, files
        self.config, self.tower, self.processor = files.model, files.tower, files.processor
        self.found: dict[str, Any] = {}

    def __getattr__(self, field: str) -> Any:
        if field not in self.found:
            rule = self.rules.get(field)
            if isinstance(rule, Key):
                rule = rule.read(self, _PLACE_OF.get(field, "tower"))
            self.found[field] = rule(self) if callable(rule) else rule
        return self.found[field]

    def read(self, place: str) -> dict[str, Any]:
        """Return the fields of a dataclass that rules name."""
        return {field: getattr(self, field) for field in self.rules if _PLACE_OF.get(field) == place}


FieldRule = Callable[[FieldReader], Any]
"""Rule that computes a field."""
Check = Callable[[FieldReader], None]
"""Check of all fields. Raises ModelError."""


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a model's files, read by the type of its default: a number, flag, text or list of numbers.

    `paths`: `place.key` or `place.object.key` with a place of `_PLACES`, several by `|`, of which the first
    that is present counts. Without a place it is that of the field. `most`: limit of a whole number.
    `default` may be a rule.
    """

    paths: str
    default: Any
    most: int = LARGEST

    def read(self, at: FieldReader, place: str) -> Any:
        fields, key = at.files.find(self.paths, place)
        return self._value(fields, key, self.default(at) if callable(self.default) else self.default)

    def _value(self, fields: VisionFields, key: str, default: Any) -> Any:
        match default:
            case bool():
                return fields.flag(key, default=default)
            case int():
                return fields.integer(key, default, most=self.most)
            case float():
                return fields.number(key, default)
            case tuple():
                return tuple(map(int, fields.numbers(key))) or default
            case _:
                return fields.text(key, default)


class Side(Key):
    """Side of a square."""

    def _value(self, fields: VisionFields, key: str, default: Any) -> Any:
        return fields.side(key, default, min(self.most, MAX_SIDE))


class Inverse(Key):
    """Whole number whose inverse the file has."""

    def _value(self, fields: VisionFields, key: str, default: Any) -> Any:
        return fields.inverse(key, default)


class ActivationKey(Key):
    """Name of an activation."""

    def _value(self, fields: VisionFields, key: str, default: Any) -> Any:
        return fields.activation(key, default)


def hidden_act(default: str, paths: str = "hidden_act") -> Key:
    return ActivationKey(paths, default)


def token_text(key: str, default: str) -> FieldRule:
    """Return the rule for the text of a special token."""
    return lambda at: at.files.token_text(key, default)


def image_token(default: int) -> Key:
    paths = "image_token_id|image_token_index|media_placeholder_token_id|img_context_token_id"
    return Key(paths, default)


def sizes(
    width: int, inner: int, layers: int, *, heads: int = 16, patch: int = 14, **others: Any
) -> dict[str, Any]:
    """Return the keys of the sizes that all towers have, with their defaults in transformers. `others`: in
    their place.
    """
    return {
        "hidden_size": Key("hidden_size", width, MAX_WIDTH),
        "stored_layers": Key("num_hidden_layers|depth", layers, MAX_LAYERS),
        "num_heads": Key("num_attention_heads|num_heads", heads, MAX_WIDTH),
        "intermediate_size": Key("intermediate_size", inner, 16 * MAX_WIDTH),
        "patch_size": Side("patch_size", patch),
        **others,
    }


def hidden_size_of_text(at: FieldReader) -> int:
    return at.files.hidden_size


def merged_width(at: FieldReader) -> int:
    """Return the numbers of a square of merged patches."""
    return int(at.hidden_size * at.merge**2)


def feature_layers(at: FieldReader) -> tuple[int, ...]:
    """Return after how many layers the projector reads states, which it joins."""
    count, raw = at.stored_layers, at.files.model.raw
    value = raw.get("vision_feature_layer", raw.get("select_layer", at.feature_layer or -1))
    values = value if isinstance(value, list) and len(value) <= MAX_LAYERS else [value]
    if not values or not all(type(each) is int and -count - 1 <= each <= count for each in values):
        problem = f"vision_feature_layer {show(value)} is not supported, only some of {count} layers"
        raise at.config.error(problem)
    return tuple(each if each >= 0 else count + 1 + each for each in values)


def feature_layer(at: FieldReader) -> int:
    """Return how many layers are run for the states that the projector reads."""
    layers = feature_layers(at)
    if len(layers) > 1:
        problem = f"vision_feature_layer {show(list(layers))} is not supported, only one"
        raise at.config.error(problem)
    return layers[0]


def _head_dim(at: FieldReader) -> int:
    if at.hidden_size % at.num_heads:
        problem = f"hidden_size {at.hidden_size} is not a multiple of num_attention_heads {at.num_heads}"
        raise at.tower.error(problem)
    return int(at.hidden_size // at.num_heads)


def _rope_theta(at: FieldReader) -> float:
    fields, default = at.tower, at.usual_theta or 10000.0
    if not at.rope:
        return 10000.0
    rope = Fields(fields.mapping("rope_parameters") or {}, fields.where)
    theta = rope.number("rope_theta", fields.number("rope_theta", default))
    if rope.text("rope_type", "axial") not in {"axial", "default"} or not 1.0 < theta <= 1e15:
        raise fields.error(f"rope_parameters {show(dict(rope.raw))} are not supported for images")
    return theta


def _pixels(at: FieldReader) -> dict[str, Any]:
    """Return normalization and filter of the image processor, with the defaults of the family."""
    fields, (mean, std, resample) = at.processor, at.usual_pixels
    for key in ("do_resize", "do_rescale"):
        if not fields.flag(key, default=True):
            raise fields.error(f"{key} false is not supported")
    mean = fields.numbers("image_mean") or fields.numbers("norm_mean") or mean
    std = fields.numbers("image_std") or fields.numbers("norm_std") or std
    if not fields.flag("do_normalize", default=at.normalizes):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    scale = fields.number("rescale_factor", 1 / 255)
    if len(mean) != 3 or len(std) != 3 or not all(each > 0 for each in std) or not 0 < scale <= 1:
        raise fields.error("image_mean and image_std must have 3 numbers each, std above 0")
    number = fields.raw.get("resample")
    if number is not None and (not isinstance(number, int) or number not in range(6)):
        raise fields.error(f"resample must be the number of a filter of Pillow, 0 to 5, not {show(number)}")
    return {"mean": mean, "std": std, "rescale": scale, "resample": resample if number is None else number}


_USUAL: Final[dict[str, Any]] = {
    "num_layers": lambda at: at.stored_layers,
    "head_dim": _head_dim,
    "eps": Key("layer_norm_eps", 1e-6),
    "rope_theta": _rope_theta,
    "table_rows": lambda at: (at.image_side // at.patch_size) ** 2 if at.table and at.image_side else 0,
    "output_bias": lambda at: at.attention_bias is not False,
    "merge": 1,
    "window_merge": 1,
    "unit": lambda at: at.patch_size * at.merge * at.window_merge,
    "normalizes": True,
    "usual_pixels": (CLIP_MEAN, CLIP_STD, 3),
    "projector_size": hidden_size_of_text,
    "projector_activation": hidden_act("gelu", "model.projector_hidden_act"),
    "image_text": "<image>",
    "placeholder": lambda at: at.image_text,
}
"""Rules of fields where families have no others. Fields that no dataclass has are for other rules."""
_PLACE_OF: Final = {
    field.name: place
    for place, kind in (("model", VisionConfig), ("processor", ImageProcessorConfig), ("tower", TowerConfig))
    for field in dataclass_fields(kind)
}
"""Files of keys, by the fields that are read from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """Vision part of some models as data: `read` makes a `VisionConfig` of their files."""

    name: str
    """Name in docs and errors."""
    names: TowerNames
    """Published names of tensors."""
    rules: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `TowerConfig`, `ImageProcessorConfig` and `VisionConfig`: each a value, a `Key` of
    `vision_config`, the image processor or config.json, or a `FieldRule`.
    """
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that may have one value alone, which a `FieldRule` may say."""
    refuse: Mapping[str, FieldRule] = field(default_factory=dict)
    """Rules that are true for what is not supported, by the error: the file (`config`, `tower`, `processor`),
    a colon, and the problem with fields as {at.field}.
    """
    checks: tuple[Check, ...] = ()

    def but(
        self,
        name: str,
        names: Mapping[str, Any] | TowerNames | None = None,
        *,
        only: Mapping[str, Any] | None = None,
        refuse: Mapping[str, FieldRule] | None = None,
        checks: tuple[Check, ...] = (),
        **rules: Any,
    ) -> "VisionFamily":
        """Return this family with another name, other tensors, rules, and checks beside its own."""
        return VisionFamily(
            name=name,
            names=names if isinstance(names, TowerNames) else replace(self.names, **(names or {})),
            rules={**self.rules, **rules},
            only={**self.only, **(only or {})},
            refuse={**self.refuse, **(refuse or {})},
            checks=(*self.checks, *checks),
        )

    def read(self, files: VisionFiles) -> VisionConfig:
        """Return the vision part of a model. Raises ModelError."""
        if files.tower.integer("num_channels", 3) != 3 or files.tower.integer("in_channels", 3) != 3:
            raise files.tower.error("images without 3 color channels are not supported")
        at = FieldReader(self.rules, files)
        tower = TowerConfig(names=replace(self.names, **(at.other_names or {})), **at.read("tower"))
        processor = ImageProcessorConfig(**at.read("processor"), **_pixels(at))
        for path, usual in self.only.items():
            fields, key = files.find(path, "model")
            wanted = usual(at) if callable(usual) else usual
            value = fields.raw.get(key, wanted)
            # Null is what other values are computed from.
            if value != wanted and not (value is None and callable(usual)):
                raise fields.error(f"{key} {show(value)} is not supported, only {show(wanted)}")
        for error, is_wrong in self.refuse.items():
            if is_wrong(at):
                file, _, problem = error.partition(": ")
                raise getattr(at, file).error(problem.format(at=at))
        for check in self.checks:
            check(at)
        return VisionConfig(
            **at.read("model"),
            family=self.name,
            hidden_size=files.hidden_size,
            tower=tower,
            processor=processor,
        )
