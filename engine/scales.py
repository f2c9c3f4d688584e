"""Numbers that some architectures multiply with, and bounds of others. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    attention: float | None = None
    """Of scores; None: 1 / sqrt(head_dim)."""
    embedding: float = 1.0
    """Of a token's row, rounded to the model's dtype."""
    attention_cap: float | None = None
    """Scaled scores s count as cap * tanh(s / cap)."""
    logits_cap: float | None = None
    """The same of logits."""
