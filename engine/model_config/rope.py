"""RoPE part of config.json."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .attention import FULL, SLIDING, layer_types, windows_by_type
from .fields import Fields, raw_rope, show

MAX_FACTOR = 65536.0
MAX_THETA = 1e15
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of one RoPE variant; those that a variant does not use keep their defaults."""

    rotary_dim: int
    """Number of dimensions of a head that are rotated, the first ones."""
    interleaved: bool = False
    """True if each dimension is paired with its neighbor, and not with the one `rotary_dim` / 2 away."""
    is_reversed: bool = False
    """True if pairs turn the other way, which is the usual way for pairs of swapped halves."""
    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    """Context length of pre-training, before scaling."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    turned: int = 0
    """Number of dimensions that rotate where the rest has an angle of 0; 0: all."""
    mscales: tuple[float, float] | None = None
    """Factors of cos and sin for contexts up to `original_context` and beyond; None: `attention_factor`."""
    query_growth: float = 0.0
    """Factor b of queries at position p, which are multiplied by 1 + b log(1 + floor(p / original_context));
    0: none."""
    growth_start: int = 0
    """Number that is added to p there."""
    of_queries: bool = False
    """True for the variant that multiplies queries by that, beside the one that rotates keys."""

    @property
    def short_context(self) -> int:
        """Return the longest sequence that has the short factors of LongRoPE, in tokens: all tokens of a
        longer one have the long factors. 0: sequences of all lengths are rotated alike.
        """
        if self.rope_type != "longrope":
            return 0
        scales = self.mscales or (1.0, 1.0)
        is_same = self.short_factor == self.long_factor and scales[0] == scales[1]
        return 0 if is_same else self.original_context

    @property
    def query_variant(self) -> "RopeConfig | None":
        """Return the variant for queries, if it is another than that for keys."""
        return replace(self, of_queries=True) if self.query_growth and not self.of_queries else None

    def order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the permutation from dimensions of our queries and keys to those of a checkpoint; None for
        the identity. Kernels rotate pairs half a head apart, so dimensions that are not rotated go to the end
        of each half.
        """
        turned = range(self.rotary_dim)
        half = self.rotary_dim // 2
        ends = (turned[0::2], turned[1::2]) if self.interleaved else (turned[:half], turned[half:])
        ends = ends[::-1] if self.is_reversed else ends
        middle = (self.rotary_dim + head_dim) // 2
        order = (*ends[0], *range(self.rotary_dim, middle), *ends[1], *range(middle, head_dim))
        return None if order == tuple(range(head_dim)) else order

    def context_limit(self, max_position_embeddings: int) -> int:
        """Return the longest sequence that the variant supports, in tokens."""
        if self.rope_type == "dynamic":
            return int(max_position_embeddings * self.factor)
        if self.rope_type in {"linear", "yarn"}:
            return max(max_position_embeddings, int(self.original_context * self.factor))
        return max_position_embeddings


LAYER_KINDS = FULL, SLIDING
LayerRopes = tuple[tuple[RopeConfig, ...], tuple[int, ...]]
"""RoPE variants, and the index of each layer's."""
RopeRule = Callable[[Fields, int, int, int], LayerRopes]
"""Rule (fields, head_dim, max_position_embeddings, layers) -> the RoPE of layers."""


def everywhere(read: Callable[[Fields, int, int], RopeConfig]) -> RopeRule:
    """Return the rule by which all layers have the RoPE that `read` returns."""
    return lambda fields, head_dim, positions, layers: ((read(fields, head_dim, positions),), (0,) * layers)


def except_in(rule: RopeRule, still: Callable[[Fields, int], Iterable[bool]]) -> RopeRule:
    """Return a rule by which some layers do not use the one RoPE of `rule` (NoPE): those for which `still`
    (fields, layers) returns True.
    """

    def read(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
        ropes, _ = rule(fields, head_dim, positions, layers)
        unused = tuple(map(int, still(fields, layers)))
        return (*ropes, RopeConfig(rotary_dim=0)) if any(unused) else ropes, unused

    return read


def parse_rope(fields: Fields, head_dim: int, positions: int) -> RopeConfig:
    return whole_heads(raw_rope(fields), fields, head_dim, positions)


def parse_partial_rope(fields: Fields, head_dim: int, positions: int) -> RopeConfig:
    """Read a RoPE over the first dimensions of a head."""
    raw = raw_rope(fields)
    return read_rope(raw, fields, part_of_head(raw, fields, head_dim), positions)


def parse_rope_of_rotary_dim(fields: Fields, head_dim: int, positions: int) -> RopeConfig:
    """Read a RoPE over the first `rotary_dim` dimensions of a head."""
    if fields.raw.get("rotary_dim") is not None and "partial_rotary_factor" not in raw_rope(fields):
        part = fields.integer("rotary_dim") / head_dim
        fields = Fields({"partial_rotary_factor": part, **fields.raw}, fields.where)
    return parse_partial_rope(fields, head_dim, positions)


def parse_rope_of_alpha(fields: Fields, head_dim: int, positions: int) -> RopeConfig:
    """Read a RoPE whose theta grows by `alpha`. Its files call that `dynamic`, but it is the same for all
    lengths.
    """
    raw = raw_rope(fields)
    alpha = Fields(raw, f"{fields.where}: rope parameters").number("alpha", 0.0)
    if not 0.0 <= alpha <= MAX_FACTOR:
        raise fields.error(f"alpha {alpha} must be from 0 to {MAX_FACTOR:.0f}")
    if raw.get("rope_type", raw.get("type")) != "dynamic" or not alpha:
        return parse_rope(fields, head_dim, positions)
    rope = whole_heads({**raw, "rope_type": "default"}, fields, head_dim, positions)
    rope = replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))
    if rope.theta > MAX_THETA:
        raise fields.error(f"rope_theta, grown by alpha {alpha}, is larger than {MAX_THETA:g}")
    return rope


def parse_phi3_rope(fields: Fields, head_dim: int, positions: int) -> RopeConfig:
    """Read a LongRoPE, under any of the names that it had, or a default RoPE."""
    raw = raw_rope(fields)
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if rope_type in ("su", "yarn"):
        raw = {**raw, "rope_type": "longrope"}
    elif rope_type not in ("default", "longrope"):
        named = show(rope_type)
        raise fields.error(f"RoPE type {named} is not supported of this architecture, only longrope")
    return read_rope(raw, fields, part_of_head(raw, fields, head_dim), positions)


def full_layers(fields: Fields, layers: int) -> list[bool]:
    return [window is None for window in windows_by_type(fields, layers)]


def full_layers_beside_others(fields: Fields, layers: int) -> list[bool]:
    is_windowed = fields.raw.get("sliding_window") is not None
    return [is_full and is_windowed for is_full in full_layers(fields, layers)]


one_rope = everywhere(parse_rope)
no_rope = everywhere(lambda *_: RopeConfig(rotary_dim=0))
partial_rope = everywhere(parse_partial_rope)
interleaved_rope = everywhere(lambda *args: replace(parse_partial_rope(*args), interleaved=True))
"""Neighboring pairs, over all dimensions of a head or over the first ones."""
reversed_rope = everywhere(lambda *args: replace(parse_rope(*args), is_reversed=True))
rope_of_rotary_dim = everywhere(parse_rope_of_rotary_dim)
rope_of_alpha = everywhere(parse_rope_of_alpha)
phi3_rope = everywhere(parse_phi3_rope)
rope_of_sliding_layers = except_in(one_rope, full_layers_beside_others)
"""RoPE that layers of full attention do not use, if there are others."""
interleaved_rope_of_sliding_layers = except_in(interleaved_rope, full_layers)
rope_of_some_layers = except_in(
    one_rope, lambda fields, layers: [not turns for turns in rotating_layers(fields, layers)]
)


def rope_if_named(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return one RoPE if `position_embedding_type` is `rope`, else one that rotates nothing (NoPE)."""
    is_rope = fields.raw.get("position_embedding_type") == "rope"
    return (one_rope if is_rope else no_rope)(fields, head_dim, positions, layers)


def rope_if_theta(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return one RoPE, which rotates nothing (NoPE) where `rope_theta` is null."""
    raw = raw_rope(fields)
    is_null = (raw if "rope_theta" in raw else fields.raw).get("rope_theta", 0) is None
    return (no_rope if is_null else one_rope)(fields, head_dim, positions, layers)


def ropes_by_type(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return two RoPE variants of `rope_parameters`: for full attention, and for sliding windows."""
    names, types = LAYER_KINDS, fields.raw.get("layer_types")
    by_type = fields.mapping("rope_parameters") or {}
    if set(by_type) != set(names):
        raise fields.error(f"rope_parameters must have an entry for {' and '.join(names)}, and no others")
    raw = Fields(by_type, f"{fields.where}: rope_parameters")
    found = tuple(read_proportional_rope(raw.mapping(name) or {}, raw, head_dim, positions) for name in names)
    kinds = types if isinstance(types, list) else [names[0]] * layers
    return found, tuple(int(kind == names[1]) for kind in kinds)


def partial_ropes_by_type(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return a RoPE for full attention and one for sliding windows, each over its part of a head."""
    by_type = fields.mapping("rope_parameters") or {}
    if not by_type or not by_type.keys() <= set(LAYER_KINDS):
        raise fields.error(
            f"rope_parameters must have an entry for {' and '.join(LAYER_KINDS)}, and no others"
        )
    raw, found = Fields(by_type, f"{fields.where}: rope_parameters"), []
    for name in by_type:
        rope = rope_of_type(raw, name)
        found.append(read_rope(rope, fields, part_of_head(rope, fields, head_dim), positions))
    names, types = list(by_type), layer_types(fields, layers)
    if not set(types) <= set(names):
        raise fields.error("rope_parameters must have an entry for each type in layer_types")
    return tuple(found), tuple(names.index(kind) for kind in types)


def rope_of_texts(rule: RopeRule) -> RopeRule:
    """Return `rule` for a model whose dimensions have the time, the row or the column of an image as their
    position: all three are the same for texts.
    """

    def read(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
        rope = {key: value for key, value in raw_rope(fields).items() if not key.startswith("mrope")}
        for key in ("rope_type", "type"):
            rope |= {key: "default"} if rope.get(key) == "mrope" else {}
        return rule(fields.replace(rope_parameters=rope, rope_scaling=None), head_dim, positions, layers)

    return read


def rotating_layers(fields: Fields, layers: int) -> list[bool]:
    """Return True for each layer with RoPE: those with a 1 in `no_rope_layers`, or without the list all but
    every `no_rope_layer_interval`-th.
    """
    turns = fields.raw.get("no_rope_layers")
    if not turns:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(turns, list) or len(turns) < layers or not all(turn in (0, 1) for turn in turns):
        raise fields.error(f"no_rope_layers must have a 0 or a 1 for each of {layers} layers")
    return [bool(turn) for turn in turns[:layers]]


def olmo3_ropes(fields: Fields, head_dim: int, positions: int, layers: int) -> LayerRopes:
    """Return a scaled RoPE for layers of full attention, and an unscaled one for sliding windows."""
    names = LAYER_KINDS
    raw = fields.mapping("rope_parameters") or {FULL: fields.mapping("rope_scaling")}
    if not raw.keys() <= set(names):
        raise fields.error(f"rope_parameters must have an entry for {names[0]} and {names[1]}, and no others")
    by_type = Fields(raw, fields.where)
    found = tuple(whole_heads(rope_of_type(by_type, name), fields, head_dim, positions) for name in names)
    return found, tuple(int(name == SLIDING) for name in layer_types(fields, layers))


def rope_of_type(by_type: Fields, name: str) -> dict[str, Any]:
    """Return the RoPE parameters of one layer type. Raises ModelError where transformers reads a key beside
    them, and so has another value.
    """
    rope = by_type.mapping(name) or {}
    Fields(rope, f"{by_type.where}: {name}").refuse_others({"truncate": True}, "by layer type")
    return rope


def whole_heads(
    raw: dict[str, Any], fields: Fields, head_dim: int, max_position_embeddings: int
) -> RopeConfig:
    """Read the RoPE of an architecture that rotates all dimensions of a head. Raises ModelError."""
    if (partial := partial_rotary(raw, fields)) != 1.0:
        raise fields.error(f"partial_rotary_factor {partial} is not supported of this architecture, only 1.0")
    return read_rope(raw, fields, head_dim, max_position_embeddings)


def part_of_head(raw: dict[str, Any], fields: Fields, head_dim: int) -> int:
    """Return how many dimensions of a head are rotated. Raises ModelError."""
    partial = partial_rotary(raw, fields)
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.error(f"partial_rotary_factor {partial} of head_dim {head_dim} is no even part of it")
    return rotary_dim


def partial_rotary(raw: dict[str, Any], fields: Fields) -> float:
    rope = Fields(raw, f"{fields.where}: rope parameters")
    return rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))


def read_proportional_rope(raw: dict[str, Any], where: Fields, width: int, positions: int) -> RopeConfig:
    """Read one RoPE. A proportional one has the frequencies of whole heads, of which the fastest rotate."""
    rope, kind = Fields(raw, where.where), raw.get("rope_type", "default")
    if kind not in {"default", "proportional"}:
        raise rope.error(
            f"RoPE type {kind!r} is not supported of this architecture, only default and proportional"
        )
    found = read_rope({**raw, "rope_type": "default"}, where, width, positions)
    if kind == "default":
        return found
    part, factor = rope.number("partial_rotary_factor", 1.0), rope.number("factor", 1.0)
    turned = 2 * int(part * width // 2)
    if not 0 < turned <= width:
        raise rope.error(f"partial_rotary_factor {part} must be more than 0 and at most 1")
    if not 1.0 <= factor <= 65536.0:
        raise rope.error(f"factor {factor} must be from 1 to 65536")
    return replace(found, rope_type="proportional", turned=turned, factor=factor, original_context=positions)


def read_rope(
    raw: dict[str, Any], fields: Fields, rotary_dim: int, max_position_embeddings: int
) -> RopeConfig:
    """Read RoPE parameters from `raw`, and some of them from `fields`, the whole config.json. Raises
    ModelError.
    """
    rope = Fields(raw, f"{fields.where}: rope parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if any(isinstance(value, dict) for value in raw.values()):
        raise rope.error("RoPE parameters by layer type are not supported")
    if rope_type not in ROPE_TYPES:
        raise rope.error(f"RoPE type {show(rope_type)} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if not 1.0 < theta <= MAX_THETA:
        raise rope.error(f"rope_theta {theta} must be larger than 1 and at most {MAX_THETA:g}")
    if rope_type == "default":
        rope.refuse_others({"llama_4_scaling_beta": 0}, "with RoPE type 'default'")
        return RopeConfig(rotary_dim=rotary_dim, theta=theta)
    if rope_type == "proportional":
        raise rope.error("RoPE type 'proportional' is not supported of this architecture")
    original = fields.integer("original_max_position_embeddings", 0) or rope.integer(
        "original_max_position_embeddings", max_position_embeddings
    )
    config = RopeConfig(
        rotary_dim=rotary_dim,
        rope_type=rope_type,
        theta=theta,
        factor=rope.number("factor", max_position_embeddings / original),
        original_context=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
        short_factor=rope.numbers("short_factor"),
        long_factor=rope.numbers("long_factor"),
        mscales=read_mscales(rope) if rope_type == "longrope" else None,
        query_growth=rope.number("llama_4_scaling_beta", 0.0),
    )
    check(config, rope)
    return config


def read_mscales(rope: Fields) -> tuple[float, float] | None:
    """Return `short_mscale` and `long_mscale` (Phi-MoE); None without them."""
    short, long = rope.optional_number("short_mscale"), rope.optional_number("long_mscale")
    if short is None and long is None:
        return None
    if short is None or long is None or not 0 < min(short, long) <= max(short, long) <= MAX_FACTOR:
        raise rope.error(f"short_mscale and long_mscale must both be from 0 to {MAX_FACTOR:.0f}")
    return short, long


def check(config: RopeConfig, rope: Fields) -> None:
    if not 1.0 <= config.factor <= MAX_FACTOR:
        raise rope.error(f"factor {config.factor} must be from 1 to {MAX_FACTOR:.0f}")
    for name, value in (("attention_factor", config.attention_factor), ("mscale", config.mscale)):
        if value is not None and not 0.0 <= value <= MAX_FACTOR:
            raise rope.error(f"{name} {value} must be from 0 to {MAX_FACTOR:.0f}")
    if not 0.0 <= config.query_growth <= MAX_FACTOR:
        raise rope.error(f"llama_4_scaling_beta {config.query_growth} must be from 0 to {MAX_FACTOR:.0f}")
    if min(config.beta_fast, config.beta_slow) <= 0 or config.original_context < 2:
        raise rope.error("beta_fast and beta_slow must be positive, the original context at least 2")
    if config.rope_type == "llama3" and not 0 < config.low_freq_factor < config.high_freq_factor:
        raise rope.error("low_freq_factor must be positive, and high_freq_factor larger")
    if config.rope_type == "longrope":
        wanted = config.rotary_dim // 2
        for name, values in (("short_factor", config.short_factor), ("long_factor", config.long_factor)):
            if len(values) != wanted or min(values) <= 0:
                raise rope.error(f"{name} needs {wanted} positive numbers, it has {len(values)}")
