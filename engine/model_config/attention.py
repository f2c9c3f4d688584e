"""Attention in config.json: types and sliding windows of layers, their sizes, multipliers and softcaps, and
sizes of multi-head latent attention (MLA).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from .shape import LatentShape, RecurrentShape, SlidingShape

FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, ...]
"""Sliding window of each layer in tokens; None for full attention."""
WindowRule = Callable[[Fields, int], Windows]
"""Rule (config.json, number of layers) -> windows. Raises ModelError."""


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


TypesRule = Callable[[Fields], dict[str, Any]]
"""Rule for `Architecture.sizes` that completes `layer_types`."""


def types_where(is_full: Callable[[int, int], bool]) -> TypesRule:
    """Return a rule for files without `layer_types`: `is_full` (layer, number of layers) says which layers
    have full attention; the others have a window.
    """

    def complete(fields: Fields) -> dict[str, Any]:
        if fields.raw.get("layer_types") is not None:
            return {}
        layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        return {"layer_types": [FULL if is_full(layer, layers) else SLIDING for layer in range(layers)]}

    return complete


def types_every(count: int) -> TypesRule:
    """Return a rule for files without `layer_types`: the last of each `count` layers has full attention."""
    return types_where(lambda layer, _layers: (layer + 1) % count == 0)


def types_by_pattern(fields: Fields) -> dict[str, Any]:
    """Complete `layer_types`: the last of each `sliding_window_pattern` layers has full attention. It may be
    written as one letter a layer (`LLLG`).
    """
    pattern = fields.raw.get("sliding_window_pattern")
    if fields.raw.get("layer_types") is not None or (pattern is None and window_of(fields) is None):
        return {}
    every = len(pattern) if isinstance(pattern, str) else fields.integer("sliding_window_pattern")
    return types_every(every or MAX_LAYERS + 1)(fields)


def layer_types(fields: Fields, layers: int) -> list[str]:
    """Return the attention type of each layer; by default every fourth is full. Raises ModelError."""
    types = fields.raw.get("layer_types")
    if types is None:
        return [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(layers)]
    return fields.layer_types(types, layers, FULL, SLIDING)


def window_of(fields: Fields) -> int | None:
    """Return `sliding_window`; None for null, and for 0, which transformers writes where it is not used."""
    return fields.integer("sliding_window", 0) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Multipliers and softcaps of one model."""

    attention: float | None = None
    """Multiplier of attention scores; None: 1 / sqrt(head_dim)."""
    embedding: float = 1.0
    """Multiplier of embeddings."""
    rounds_embedding: bool = False
    """True if the embedding multiplier is rounded to the model's dtype."""
    residual: float = 1.0
    """Multiplier of the outputs of attention and MLP. The residual stream is stored divided by it instead,
    and `embedding` too; norms are invariant to that except for their epsilon."""
    logits: float = 1.0
    """Multiplier of logits."""
    attention_cap: float | None = None
    """Softcap of scaled attention scores s: cap * tanh(s / cap)."""
    logits_cap: float | None = None
    """Softcap of logits."""
    mamba_in: tuple[float, ...] = ()
    """Multipliers of what the input linear of a Mamba-2 layer gives: (z, x, B, C, dt); empty: none."""
    mamba_out: float = 1.0
    attention_out: float = 1.0
    """Multipliers of the results of Mamba-2 and attention, where a layer has both."""
    mlp: tuple[float, float] | None = None
    """Multipliers of the gate and of the result of an MLP."""
    values: float = 1.0
    """Multiplier of values that are narrower than keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes of one layer's attention and MLP."""

    kv_heads: int
    head_dim: int
    inner: int
    """Intermediate size of its MLP."""
    kv_source: int
    """Layer whose keys and values it reads: its own number, or that of an earlier layer; -1: it has no
    attention."""
    has_values: bool = True
    """False if values are the keys before their norm and RoPE."""
    sparsity: float = 0.0
    """Share of the gates of its MLP that are set to 0; 0: none is."""
    heads: int = 0
    """Query heads; 0: as many as the model has (`ModelConfig.sizes_of` fills them in)."""
    value_dim: int = 0
    """Width of a value before it is widened to `head_dim`; 0: it is as wide (filled in too)."""
    limit: float = 0.0
    """Limit of the gates of its MLP, or of its shared expert (`LimitedSwiGLU`); 0: none."""
    experts_limit: float = 0.0
    """Limit of the gates of its experts."""
    has_sinks: bool = True
    """False if heads have no sinks, where other layers have some."""
    has_attention: bool = True
    has_mlp: bool = True
    """False in a layer that lacks this part and the norm before it."""


def sliding_shape(
    windows: tuple[int | None, ...],
    sizes: tuple[LayerSizes, ...],
    heads: tuple[int, int],
    recurrent: RecurrentShape | None,
) -> SlidingShape | None:
    """Return the layers with a window; None if there are none. `heads`: KV heads of others, their width."""
    is_sliding = tuple(window is not None for window in windows)
    if not any(is_sliding):
        return None
    with_kv = [layer for layer in range(len(windows)) if recurrent is None or recurrent.has_kv[layer]]
    owners = [layer for layer in with_kv if not sizes or sizes[layer].kv_source == layer]
    sliding = [layer for layer in owners if is_sliding[layer]]
    own = [(sizes[layer].kv_heads, sizes[layer].head_dim) for layer in sliding] if sizes else []
    return SlidingShape(
        is_sliding=is_sliding,
        layers=len(sliding),
        full_layers=max(1, len(owners) - len(sliding)),
        window=max(abs(window or 0) for window in windows),
        heads=own[0] if own and own[0] != heads else None,
        sharing=len(with_kv) - len(owners),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Indexer of sparse attention: each row attends to the `top` keys that score best by small heads."""

    heads: int
    dim: int
    """Width of these heads, and of the one key of a token, which is cached behind its latent."""
    top: int
    layers: tuple[bool, ...]
    """True for each layer that selects; the others attend to what the last of them selected."""
    is_interleaved: bool
    """True if neighboring dimensions are rotated together; else those of two halves."""


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
    index: IndexConfig | None = None
    """Indexer of sparse attention; None: rows attend to all keys."""

    @property
    def query(self) -> int:
        return self.nope + self.rope

    @property
    def compressed(self) -> int:
        """Numbers of a latent and its rotated key."""
        return self.kv_rank + self.rope

    @property
    def width(self) -> int:
        """Numbers that the cache holds for a token: twice, as keys and as values."""
        return self.compressed + (0 if self.index is None else self.index.dim)

    def shape(self, hidden: int, heads: int) -> LatentShape:
        whole = hidden * self.compressed + self.kv_rank + self.compressed * self.has_bias
        split, absorbed = heads * self.value * hidden, heads * self.kv_rank * (self.nope + self.value)
        if self.q_rank:
            whole += self.q_rank * (hidden + 1 + self.has_bias)
        split += heads * self.query * (self.q_rank or hidden)
        return LatentShape(
            whole=whole + hidden * self.has_bias, split=split, absorbed=absorbed, inner=heads * self.value
        )


LatentRule = Callable[[Fields], LatentConfig | None]
"""Rule (config.json) -> MLA; None for a model without. Raises ModelError."""


def cohere_scales(fields: Fields) -> Scales:
    return Scales(logits=multiplier(fields, "logit_scale"))


def root_of_width_if(fields: Fields, key: str, *, default: bool) -> float:
    """Return the multiplier of embeddings that a flag asks for: the root of the hidden size."""
    return fields.integer("hidden_size") ** 0.5 if fields.flag(key, default=default) else 1.0


def multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    values = fields.numbers(name) if fields.raw.get(name) is not None else (1.0,) * count
    if len(values) != count:
        raise fields.error(f"{name} must have {count} numbers, not {len(values)}")
    return tuple(_in_range(fields, name, value) for value in values)


def multiplier(fields: Fields, name: str) -> float:
    return _in_range(fields, name, fields.number(name, 1.0))


def _in_range(fields: Fields, name: str, value: float) -> float:
    if not 1e-6 <= value <= 1e6:
        raise fields.error(f"{name} {value} must be between 1e-6 and 1e6")
    return value


_DECILM_ATTENTION = {"replace_with_linear": False, "unshifted_sink": False, "window_length": None}
_DECILM_MLP = {"replace_with_linear": False, "hidden_act": "silu"}


def decilm_sizes(fields: Fields) -> dict[str, Any]:
    """Return the KV heads of all layers with attention, and the largest MLP."""
    found = decilm_layers(fields, fields.integer("num_hidden_layers", most=MAX_LAYERS))
    heads = {each.kv_heads for each in found if each.has_attention}
    if len(heads) != 1:
        raise fields.error("block_configs must have one n_heads_in_group for all layers with attention")
    return {"num_key_value_heads": heads.pop(), "intermediate_size": max(each.inner for each in found)}


def decilm_layers(fields: Fields, layers: int) -> tuple[LayerSizes, ...]:
    """Return sizes by `block_configs`: a layer may lack attention or the MLP, whose size is its own."""
    blocks = fields.raw.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != layers or not all(isinstance(x, dict) for x in blocks):
        raise fields.error(f"block_configs must have an entry for each of {layers} layers")
    return tuple(_decilm_layer(fields, number, block) for number, block in enumerate(blocks))


def _decilm_layer(fields: Fields, number: int, raw: dict[str, Any]) -> LayerSizes:
    block = Fields(raw, f"{fields.where}: block_configs: layer {number}")
    attention = Fields(block.mapping("attention") or {}, f"{block.where}: attention")
    mlp = Fields(block.mapping("ffn") or {}, f"{block.where}: ffn")
    attention.refuse_others(_DECILM_ATTENTION | {"num_sink_tokens": None, "sparsify": None}, "of a DeciLM")
    mlp.refuse_others(_DECILM_MLP | {"sparsify": None}, "of a DeciLM")
    has_attention = not attention.flag("no_op", default=False)
    has_mlp = not mlp.flag("no_op", default=False)
    heads, hidden = fields.integer("num_attention_heads", most=MAX_HEADS), fields.integer("hidden_size")
    group = attention.integer("n_heads_in_group", most=MAX_HEADS) if has_attention else heads
    if heads % group:
        raise attention.error(f"n_heads_in_group {group} does not divide num_attention_heads {heads}")
    inner = mlp.integer("intermediate_size", 0) if has_mlp else 0
    if has_mlp and not inner:
        inner = -(-int(2 * mlp.number("ffn_mult") * hidden / 3) // 256) * 256
        if not 0 < inner <= 16 * MAX_WIDTH:
            raise mlp.error(f"ffn_mult {mlp.raw['ffn_mult']} makes an MLP of {inner} rows")
    return LayerSizes(
        kv_heads=heads // group,
        head_dim=fields.integer("head_dim", hidden // heads or 1),
        inner=inner,
        kv_source=number if has_attention else -1,
        has_attention=has_attention,
        has_mlp=has_mlp,
    )
