"""Attention in config.json: sliding windows of layers, and multi-head latent attention (MLA)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .fields import Fields, raw_rope
from .multipliers import Scales
from .shape import LatentShape

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


MAX_RANK = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of MLA: keys and values of all heads are linear in one latent vector of `kv_rank` numbers, which
    is cached with one rotated key of `rope` numbers.
    """

    q_rank: int
    """Size of the latent that queries are computed from; 0: they are computed from hidden states."""
    kv_rank: int
    nope: int
    """Dimensions of a query that are not rotated."""
    rope: int
    """Dimensions of a query that are rotated."""
    value: int
    """Dimensions of a head's value."""
    has_bias: bool

    @property
    def query(self) -> int:
        return self.nope + self.rope

    @property
    def width(self) -> int:
        """Numbers that the cache holds for a token: twice, as keys and as values."""
        return self.kv_rank + self.rope

    def shape(self, hidden: int, heads: int) -> LatentShape:
        whole = hidden * self.width + self.kv_rank + self.width * self.has_bias
        split, absorbed = heads * self.value * hidden, heads * self.kv_rank * (self.nope + self.value)
        if self.q_rank:
            whole += self.q_rank * (hidden + 1 + self.has_bias)
        split += heads * self.query * (self.q_rank or hidden)
        return LatentShape(
            whole=whole + hidden * self.has_bias, split=split, absorbed=absorbed, inner=heads * self.value
        )


LatentRule = Callable[[Fields], LatentConfig | None]
"""Rule (config.json) -> MLA; None for a model without. Raises ModelError."""


def no_latent(_fields: Fields) -> None:
    return None


def deepseek_latent(fields: Fields) -> LatentConfig:
    rank = 0 if fields.raw.get("q_lora_rank") is None else fields.integer("q_lora_rank", most=MAX_RANK)
    found = LatentConfig(
        q_rank=rank,
        kv_rank=fields.integer("kv_lora_rank", most=MAX_RANK),
        nope=fields.integer("qk_nope_head_dim", most=MAX_RANK),
        rope=fields.integer("qk_rope_head_dim", most=MAX_RANK),
        value=fields.integer("v_head_dim", most=MAX_RANK),
        has_bias=fields.flag("attention_bias", default=False),
    )
    if found.rope % 2:
        raise fields.error(f"qk_rope_head_dim {found.rope} must be even")
    return found


def deepseek_sizes(fields: Fields) -> dict[str, Any]:
    """Return the heads as the cache sees them: one for keys and values, of the latent's width."""
    return {"head_dim": deepseek_latent(fields).width, "num_key_value_heads": 1}


def deepseek_scales(fields: Fields) -> Scales:
    scale, raw = deepseek_latent(fields).query ** -0.5, raw_rope(fields)
    rope = Fields(raw, f"{fields.where}: rope parameters")
    mscale, factor = rope.number("mscale_all_dim", 0.0), rope.number("factor", 1.0)
    if raw.get("rope_type", raw.get("type", "default")) != "default" and mscale and factor > 1:
        scale *= (0.1 * mscale * math.log(factor) + 1) ** 2
    return Scales(attention=scale)
