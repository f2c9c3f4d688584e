"""Whether an engine verifies drafts, and how many rows a step may have for them."""

from typing import Final

from llmbox.kernels.cpu.levels import usable_levels
from llmbox.kernels.ops import Ops

from .config import EngineConfig
from .errors import DeviceError
from .memory_plan import MemoryPlan
from .runnable import why_no_drafts

_READ: Final = 12e9
"""Bytes of weights that a core reads in a second, about. In bf16 two operations a row come with two bytes: so
many rows as a core does operations in that time are computed while the weights are read."""


def draft_rows(config: EngineConfig, plan: MemoryPlan, ops: Ops, *, overlaps: bool) -> int:
    """0: no drafts. `overlaps`: steps are launched before the one before is back. Raises DeviceError."""
    if config.speculate == "off":
        return 0
    reason = why_no_drafts(plan.ranks, overlaps=overlaps, row_invariant=ops.row_invariant)
    if not reason:
        return min(int(usable_levels()[0].flops / _READ), plan.token_budget)
    if config.speculate == "on":
        raise DeviceError(f"speculate was asked for, but {reason}: load with --speculate auto or off")
    return 0
