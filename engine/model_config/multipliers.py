"""Numbers that some architectures multiply with, and bounds of others. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    attention: float | None = None
    """Of scores; None: 1 / sqrt(head_dim)."""
    embedding: float = 1.0
    """Of a token's row."""
    rounds_embedding: bool = False
    """That one to the model's dtype."""
    residual: float = 1.0
    """Of what layers add. Sums are kept divided by it instead, so `embedding` is, too; norms do not notice,
    but for their eps."""
    logits: float = 1.0
    attention_cap: float | None = None
    """Scaled scores s count as cap * tanh(s / cap)."""
    logits_cap: float | None = None
    """The same of logits."""
