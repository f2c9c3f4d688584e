"""Whether an engine verifies drafts, and how many rows a step may have for them."""

from typing import Final

from llmbox.kernels.cpu.levels import usable_levels
from llmbox.kernels.ops import Ops

from .config import EngineConfig
from .errors import DeviceError
from .memory_plan import MemoryPlan

_READ: Final = 12e9
"""Bytes of weights that a core reads in a second, about. In bf16 two operations a row come with two bytes: so
many rows as a core does operations in that time are computed while the weights are read."""


def draft_rows(config: EngineConfig, plan: MemoryPlan, ops: Ops, *, overlaps: bool) -> int:
    """0: no drafts. `overlaps`: steps are launched before the one before is back. Raises DeviceError."""
    if config.speculate == "off":
        return 0
    if (reason := _why_not(plan, ops, overlaps=overlaps)) is None:
        return min(int(usable_levels()[0].flops / _READ), plan.token_budget)
    if config.speculate == "on":
        raise DeviceError(f"speculate was asked for, but {reason}: load with --speculate auto or off")
    return 0


def _why_not(plan: MemoryPlan, ops: Ops, *, overlaps: bool) -> str | None:
    if plan.ranks > 1:
        return f"the model runs on {plan.ranks} ranks, which do not verify drafts yet"
    if overlaps:
        return "steps overlap, so that a step does not know the tokens that drafts would follow"
    if not ops.row_invariant:
        return (
            f"the kernels that run here ({ops.name}) may compute a row differently beside others, so that "
            "drafts could change tokens; see `llmbox doctor`"
        )
    return None
