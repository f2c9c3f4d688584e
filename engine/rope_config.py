"""How positions become rotations: the RoPE part of config.json. No torch here: the daemon reads it too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config_fields import Fields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One variant with its numbers; fields that a variant does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    """Positions seen in pre-training, before scaling."""
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

    def context_limit(self, max_position_embeddings: int) -> int:
        """Longest sequence the variant is meant for."""
        if self.rope_type in {"linear", "dynamic"}:
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_context * self.factor))
        return max_position_embeddings


RopeRule = Callable[[Fields, int, int, int], tuple[tuple[RopeConfig, ...], tuple[int, ...]]]
"""(fields, head_dim, max_position_embeddings, layers) -> all ropes, and which one each layer turns by."""


def one_rope(
    fields: Fields, head_dim: int, positions: int, layers: int
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    return (parse_rope(fields, head_dim, positions),), (0,) * layers


def parse_rope(fields: Fields, head_dim: int, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or from `rope_scaling` and `rope_theta` (before)."""
    raw: dict[str, Any] = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    rope = Fields(raw, f"{fields.where}: rope parameters")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    rope_type = raw.get("rope_type", raw.get("type", "default"))
    if any(isinstance(value, dict) for value in raw.values()):
        raise rope.error("RoPE parameters by layer type are not supported")
    if rope_type not in ROPE_TYPES:
        raise rope.error(f"RoPE type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise rope.error(f"partial_rotary_factor {partial} is not supported, only 1.0")
    if theta <= 1.0:
        raise rope.error(f"rope_theta {theta} must be larger than 1")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    original = fields.integer("original_max_position_embeddings", 0) or rope.integer(
        "original_max_position_embeddings", max_position_embeddings
    )
    config = RopeConfig(
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
    )
    check(config, rope, head_dim)
    return config


def check(config: RopeConfig, rope: Fields, head_dim: int) -> None:
    if config.factor < 1.0:
        raise rope.error(f"factor {config.factor} must be at least 1")
    if min(config.beta_fast, config.beta_slow) <= 0 or config.original_context < 2:
        raise rope.error("beta_fast and beta_slow must be positive, the original context at least 2")
    if config.rope_type == "llama3" and config.high_freq_factor <= config.low_freq_factor:
        raise rope.error("high_freq_factor must be larger than low_freq_factor")
    if config.rope_type == "longrope":
        for name, values in (("short_factor", config.short_factor), ("long_factor", config.long_factor)):
            if len(values) != head_dim // 2 or min(values) <= 0:
                raise rope.error(f"{name} needs {head_dim // 2} positive numbers, it has {len(values)}")
