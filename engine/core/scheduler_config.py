"""The scheduler's numbers, all decided at load: nothing here is `None` any more."""

from dataclasses import dataclass

from ..config import Batching
from ..errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """See `EngineConfig` for what the shared names mean."""

    context: int
    max_running: int
    token_budget: int
    batching: Batching = "continuous"
    chunked_prefill: bool = True
    premium_share: float = 0.0
    watermark: float = 0.01
    ageing_seconds: float = 10.0
    """A band of priority that waits this long is lifted by one, for one request."""
    draft_rows: int = 0
    """Rows of a step up to which drafts are verified (`draft_scheduler.py`); 0: none are. Only for runners
    that take one step at a time and whose rows do not depend on each other."""

    def __post_init__(self) -> None:
        # A decoding request takes one token in every step: a smaller budget would stall streams.
        if self.token_budget < self.max_running:
            raise EngineError(
                f"token_budget {self.token_budget} is below max_running {self.max_running}: "
                "every running request needs one token a step; raise one or lower the other"
            )
