"""Multi-head latent attention (MLA) in config.json."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .fields import Fields
from .multipliers import Scales
from .rope import raw_rope
from .shape import LatentShape

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
