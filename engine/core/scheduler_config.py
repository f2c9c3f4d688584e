"""Scheduler configuration with every value decided at load: no field is `None`."""

from dataclasses import dataclass

from ..config import Batching
from ..errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of the scheduler. Fields that `EngineConfig` has too mean the same."""

    context: int
    max_running: int
    token_budget: int
    batching: Batching = "continuous"
    chunked_prefill: bool = True
    premium_share: float = 0.0
    watermark: float = 0.01
    ageing_seconds: float = 10.0
    """Seconds after which a waiting priority band is lifted by one, for one request."""
    state_slots: int = 0
    """Slots of recurrent state, of running sequences and of the prefix cache together; 0 for a model
    without."""
    window: int = 0
    """Tokens behind which blocks of sliding-window layers are freed; 0: never."""
    window_blocks: int = 0
    """Blocks of these layers."""
    draft_rows: int = 0
    """Maximum rows of a step with draft tokens (`draft_scheduler.py`); 0 turns drafts off. Only for executors
    that run one step at a time and whose rows are independent of each other."""

    def __post_init__(self) -> None:
        # A decoding request takes one token in every step: a smaller budget would stall streams.
        if self.token_budget < self.max_running:
            raise EngineError(
                f"token_budget {self.token_budget} is below max_running {self.max_running}: "
                "every running request needs one token a step; raise one or lower the other"
            )
