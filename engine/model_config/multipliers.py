"""Multipliers and softcaps of some architectures."""

from dataclasses import dataclass

from .fields import Fields


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


def no_scales(_fields: Fields) -> Scales:
    return Scales()


def cohere_scales(fields: Fields) -> Scales:
    return Scales(logits=multiplier(fields, "logit_scale"))


def granite_scales(fields: Fields) -> Scales:
    residual = multiplier(fields, "residual_multiplier")
    return Scales(
        embedding=multiplier(fields, "embedding_multiplier") / residual,
        attention=multiplier(fields, "attention_multiplier"),
        residual=residual,
        logits=1 / multiplier(fields, "logits_scaling"),
    )


def multiplier(fields: Fields, name: str) -> float:
    value = fields.number(name, 1.0)
    if not 1e-6 <= value <= 1e6:
        raise fields.error(f"{name} {value} must be between 1e-6 and 1e6")
    return value
