"""Sliding windows of layers: the rules by which architectures read them from config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from .fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, ...]
"""Sliding window of each layer in tokens; None for full attention."""
WindowRule = Callable[[Fields, int], Windows]
"""Rule (config.json, number of layers) -> windows. Raises ModelError."""
MISTRAL3_TEXT: Mapping[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e9,
    "sliding_window": None,
}
"""Defaults of transformers for the text part of a Mistral 3, whose `text_config` may leave keys out."""


def no_windows(_fields: Fields, layers: int) -> Windows:
    return (None,) * layers


def one_window(fields: Fields, layers: int) -> Windows:
    """Return `sliding_window` for all layers."""
    return (window_of(fields),) * layers


def windows_if_used(fields: Fields, layers: int) -> Windows:
    """Return `sliding_window` for all layers if `use_sliding_window` is set."""
    used = fields.flag("use_sliding_window", default=False)
    return one_window(fields, layers) if used else no_windows(fields, layers)


def windows_of_later_layers(fields: Fields, layers: int) -> Windows:
    """Return windows by `layer_types`, or from `max_window_layers` on, if `use_sliding_window` is set."""
    window = window_of(fields)
    if window is None or not fields.flag("use_sliding_window", default=False):
        return (None,) * layers
    if fields.raw.get("layer_types") is not None:
        return windows_by_type(fields, layers)
    full = int(fields.number("max_window_layers", 28))
    return tuple(None if layer < full else window for layer in range(layers))


def windows_by_type_if_used(fields: Fields, layers: int) -> Windows:
    """Return windows by `layer_types` if `use_sliding_window` is set."""
    if window_of(fields) is None or not fields.flag("use_sliding_window", default=False):
        return no_windows(fields, layers)
    if fields.raw.get("layer_types") is None:
        raise fields.error("use_sliding_window needs layer_types, which name the layers that have a window")
    return windows_by_type(fields, layers)


def windows_by_type(fields: Fields, layers: int) -> Windows:
    """Return `sliding_window` for the layers of sliding attention in `layer_types`."""
    window = window_of(fields)
    return tuple(window if name == SLIDING else None for name in layer_types(fields, layers))


def windows_every_other(fields: Fields, layers: int) -> Windows:
    """Return windows by `layer_types`, or for every other layer from the first on."""
    if fields.raw.get("layer_types") is None:
        types = [FULL if layer % 2 else SLIDING for layer in range(layers)]
        fields = Fields({**fields.raw, "layer_types": types}, fields.where)
    return windows_by_type(fields, layers)


def exaone4_windows(fields: Fields, layers: int) -> Windows:
    """Return windows by `layer_types`, or for all layers but every `sliding_window_pattern`-th, which may be
    written as one letter a layer (`LLLG`).
    """
    if window_of(fields) is None:
        return no_windows(fields, layers)
    if fields.raw.get("layer_types") is None:
        pattern = fields.raw.get("sliding_window_pattern")
        every = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern")
        types = [FULL if every and (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
        fields = Fields({**fields.raw, "layer_types": types}, fields.where)
    return windows_by_type(fields, layers)


def layer_types(fields: Fields, layers: int) -> list[str]:
    """Return the attention type of each layer; by default every fourth is full. Raises ModelError."""
    types = fields.raw.get("layer_types")
    if types is None:
        return [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(t in (FULL, SLIDING) for t in types):
        raise fields.error(f"layer_types must name {FULL} or {SLIDING} for each of {layers} layers")
    return types


def window_of(fields: Fields) -> int | None:
    """Return `sliding_window`; None for null, and for 0, which transformers writes where it is not used."""
    return fields.integer("sliding_window", 0) or None
