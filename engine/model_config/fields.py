"""Typed access to a parsed JSON object, with errors that name the file and the key."""

import math
from collections.abc import Mapping
from typing import Any, Final, Self

from ..config import Dtype
from ..errors import ModelError

LARGEST: Final = 2**31 - 1
"""Maximum of integers in a model's config, because kernels count in 32 bits."""
MAX_LAYERS: Final = 1024
MAX_HEADS: Final = 1 << 12
MAX_WIDTH: Final = 1 << 20
"""Maximum width of hidden states and heads; MLPs and vocabularies may be 16 times as wide."""
MAX_POSITIONS: Final = 1 << 27
"""Maximum context: fourteen times the longest that any model was published with."""
_SHOWN: Final = 80
OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Keys that config.json may have next to `text_config` and not in it."""
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
_TEXT_SIZES: Final[dict[str, tuple[int, ...]]] = {
    "aria_text": (32000, 4096, 4096, 32, 32, 32, 2048),
    "cohere2": (256000, 8192, 22528, 40, 64, 64, 8192),
    "exaone4": (102400, 4096, 16384, 32, 32, 32, 2048),
    "glm4v_moe_text": (151424, 4096, 10944, 46, 96, 8, 65536),
    "glm4v_text": (151552, 4096, 13696, 40, 32, 2, 32768),
    "glm_ocr_text": (59392, 1024, 4096, 16, 16, 8, 131072),
    "lfm2": (65536, 2560, 12288, 32, 32, 8, 128000),
    "lfm3": (128000, 2048, 7680, 24, 16, 4, 128000),
    "llama": (32000, 4096, 11008, 32, 32, 32, 2048),
    "ministral3": (131072, 4096, 14336, 34, 32, 8, 262144),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 131072),
    "mistral4": (131072, 4096, 12288, 36, 32, 32, 1048576),
    "muse_glimmer_text": (202048, 6656, 19968, 52, 32, 2, 131072),
    "paddleocr_vl_text": (103424, 1024, 3072, 18, 16, 2, 131072),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, 32768),
    "qwen2_5_omni_text": (152064, 3584, 18944, 28, 28, 4, 32768),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 32768),
    "qwen3_5_moe_text": (248320, 2048, 5632, 40, 16, 2, 32768),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 32768),
    "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16, 16, 128000),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 32, 128000),
    "step3p5": (128815, 4096, 11264, 45, 64, 8, 128000),
}
"""Sizes of language models of vision-language models by `model_type`, in the order of `_SIZES`: transformers
before 5 wrote a `text_config` without what its class has as a default."""
DTYPES: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


class Fields:
    """Typed reader of one JSON object. `where` names it in errors, which call a key as `aliases` does. A key
    with null counts as absent.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, aliases: Mapping[str, str] | None = None) -> None:
        self.raw = raw
        self.where = where
        self.aliases = aliases or {}

    def replace(self, **changes: Any) -> Self:
        """Return these fields with other values of some keys."""
        return type(self)({**self.raw, **changes}, self.where, self.aliases)

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {problem}")

    def integer(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """Return a positive integer (0 only if it is the default) of at most `most`. Raises ModelError."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and value != default):
            raise self.error(f"{self._named(key)} must be a positive whole number, not {show(value)}")
        if value > most:
            raise self.error(f"{self._named(key)} {show(value)} is beyond anything known ({most})")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not is_number(value):
            raise self.error(f"{self._named(key)} must be a number, not {show(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key, ())
        if not isinstance(value, (list, tuple)) or not all(is_number(x) for x in value):
            raise self.error(f"{self._named(key)} must be a list of numbers")
        return tuple(float(x) for x in value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{self._named(key)} must be true or false, not {show(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(f"{self._named(key)} must be a string, not {show(value)}")
        return value

    def mapping(self, key: str) -> dict[str, Any] | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{self._named(key)} must be an object, not {show(value)}")
        return value

    def layer_numbers(self, key: str, value: Any, layers: int) -> list[int]:
        """Return the value of a key that lists layers, from 0 to `layers` - 1. Raises ModelError."""
        if not isinstance(value, list) or not all(type(each) is int and 0 <= each < layers for each in value):
            raise self.error(f"{key} must be a list of layers below {layers}")
        return value

    def layer_types(self, value: Any, layers: int, *names: str) -> list[str]:
        """Return the value of `layer_types`, which has one of two names for each layer. Raises ModelError."""
        if not isinstance(value, list) or len(value) != layers or not all(each in names for each in value):
            raise self.error(f"layer_types must name {' or '.join(names)} for each of {layers} layers")
        return value

    def refuse_others(self, usual: Mapping[str, Any], of_what: str) -> None:
        """Raise ModelError for a key that has another value than the usual one. `of_what`: the model."""
        for key, value in usual.items():
            if self.raw.get(key) not in (None, value):
                only = "" if value is None else f", only {value}"
                raise self.error(f"{key} {show(self.raw[key])} is not supported {of_what}{only}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{self._named(key)} is missing")
        return value

    def _named(self, key: str) -> str:
        return self.aliases.get(key, key)


def is_number(value: Any) -> bool:
    """Return True for a finite number in the range of float."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def show(value: Any) -> str:
    """Format a value from a file for an error, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def norm_eps(fields: Fields) -> float:
    eps = fields.number("rms_norm_eps", 1e-6)
    if not 0.0 <= eps <= 1.0:
        raise fields.error(f"rms_norm_eps {eps} must be from 0 to 1")
    return eps


def checkpoint_dtype(fields: Fields) -> Dtype:
    """Return the dtype of the checkpoint: transformers 5 writes `dtype`, older versions `torch_dtype`."""
    dtype = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.error(f"dtype {show(dtype)} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def raw_rope(fields: Fields) -> dict[str, Any]:
    """Return `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    return fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}


def text_fields(fields: Fields) -> Fields:
    """Return the `text_config`, or `llm_config`, of a vision-language model, maybe within a `thinker_config`,
    with the keys that apply to the whole model. Older files have all keys beside those of the tower.
    `tie_word_embeddings` of the whole model counts more than that of its text part, as in transformers.
    """
    if thinker := fields.mapping("thinker_config"):
        whole = {key: fields.raw[key] for key in OF_THE_WHOLE if fields.raw.get(key) is not None}
        fields = Fields({**whole, **thinker}, f"{fields.where}: thinker_config")
    text = fields.mapping("text_config") or fields.mapping("llm_config")
    if text is None and "hidden_size" in fields.raw:
        return fields
    if text is None:
        raise fields.error("text_config is missing, which describes the language part")
    whole = {key: fields.raw[key] for key in OF_THE_WHOLE if fields.raw.get(key) is not None}
    decisive = {key: value for key, value in whole.items() if key == "tie_word_embeddings"}
    return Fields({**whole, **text, **decisive}, f"{fields.where}: text_config")


def with_text_sizes(fields: Fields, model_type: str) -> Fields:
    """Return a `text_config` with the sizes that it leaves out because they are the defaults of its class."""
    usual = dict(zip(_SIZES, _TEXT_SIZES.get(model_type, ()), strict=False))
    return Fields({**usual, **fields.raw}, fields.where)


def attends_both_ways(fields: Fields) -> bool:
    """Return whether each token attends to all others. `vision` means that tokens of one image do, and
    those of text do not.
    """
    return fields.raw.get("use_bidirectional_attention") not in (None, False, "vision")
