"""A mixture of experts as `Ops.experts` takes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mixture:
    """Linears of one layer's experts: one for each, or one of all by `Ops.pack_experts`."""

    gate_ups: Sequence[Any]
    """[2 F, E], gate first."""
    downs: Sequence[Any]
    """[E, F]."""
    count: int
    per_token: int
    normalised: bool
    """Shares of the chosen experts are made to sum to one."""
