"""A request inside the engine: few counters, everything else derived.

token_ids = prompt + output so far
0 ........ num_computed ........ num_tokens
   KV is in the pool   still to compute (the last one's logits give the next token)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .messages import TokenLogprobs
from .sampling import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """State of one sequence. The scheduler is its only writer; the runner reads."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_namespace: str = ""
    fork_of: str | None = None
    arrived_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""
    scheduled_at: float | None = None
    preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    """Prefix-cache chain hash of each full block of `token_ids`, as far as it was needed."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Collected over the chunks of the prompt until the first output takes them along."""
    answered: bool = False
    """Whether the first output was given."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)
        assert len(self.token_ids) >= len(self.prompt_ids) > 0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not in the pool yet: 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.num_computed
