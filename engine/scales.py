"""Numbers that some architectures multiply with. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    attention: float | None = None
    """Of scores; None: 1 / sqrt(head_dim)."""
