"""A request inside the engine: few counters, everything else derived.

token_ids = prompt + output so far
0 ........ num_computed ....... num_scheduled ........ num_tokens ......... + num_pending
   KV is in the pool    in launched steps     to compute          sampled there, not known here yet

Where one step runs at a time, nothing is launched whenever a step is scheduled: then num_scheduled is
num_computed, and num_pending is 0. The last token's logits give the next token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import InvalidRequest
from ..ipc.messages import PrefixMissReason, TokenLogprobs
from ..sampling_params import SamplingParams
from .ngram_proposer import NgramProposer
from .structured_output import GrammarState

if TYPE_CHECKING:
    from .fair_shares import Flow


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """State of one sequence. The scheduler is its only writer; the runner reads."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    """Whose share of the engine it takes; see `AddRequest`."""
    cache_namespace: str = ""
    fork_of: str | None = None
    arrived_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    admissions: int = 0
    """Times it began or ceased to run: tells a launched step's rows from those of a life before."""
    turn: int = 0
    """Number of the last step that computes some of it."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""
    num_looked_up: int = 0
    """Prompt tokens in whole blocks that were looked up in the prefix cache, at first admission."""
    prefix_end: PrefixMissReason | None = None
    """Why no more of them were found."""
    scheduled_at: float | None = None
    preemptions: int = 0
    """Times that it lost its blocks to running requests that grew."""
    displacements: int = 0
    """Times that it gave its place to a waiting request."""
    flow: "Flow" = field(init=False)
    """Set when the scheduler takes it."""
    num_charged: int = 0
    """Tokens that count in its flow already."""
    num_protected: int = 0
    """Output tokens before which it keeps its place."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Prefix-cache chain hash of each full block of `token_ids`, as far as it was needed."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Collected over the chunks of the prompt until the first output takes them along."""
    pooled: list[int] = field(default_factory=list)
    """Sums of states over the chunks of the prompt (`pooling.py`), where its vector is wanted."""
    constraint: GrammarState | None = None
    """The way through its grammar, where it has one."""
    mask: bytes | None = None
    """Which ids its next token may be (`GrammarState.allowed`), for the step that draws it."""
    drafter: NgramProposer | None = None
    """Where steps verify drafts, from its first decoding step on; read and written by `Drafting`."""
    answered: bool = False
    """Whether the first output was given."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)
        if not len(self.token_ids) >= len(self.prompt_ids) > 0:
            raise InvalidRequest("the prompt has no tokens")

    def append(self, ids: Sequence[int]) -> None:
        """What a step drew for it, one token or more."""
        self.token_ids += ids
        self.num_pending -= 1

    def renew_mask(self) -> None:
        """Before a token is drawn, when all before it are in `token_ids`."""
        if self.constraint is not None:
            self.mask = self.constraint.allowed(self.token_ids)

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
        """Tokens that no step has computed or will compute yet: 1 while decoding, more while prefilling."""
        return len(self.token_ids) + self.num_pending - self.num_scheduled

    @property
    def num_output_before(self) -> int:
        """Output tokens before the one that the step last scheduled draws, known here or not."""
        return self.num_output + self.num_unknown

    @property
    def num_unknown(self) -> int:
        """How many of those a device knows alone."""
        return max(0, self.num_pending - 1)

    @property
    def pools(self) -> bool:
        """It draws no token, and ends with the last row of its prompt."""
        return self.params.pooling is not None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the host must know its last token before the next is drawn: a grammar reads it."""
        return self.params.grammar is not None

    @property
    def keeps_place(self) -> bool:
        """It was served out of turn and is to get something of it, or its last tokens are on their way."""
        return self.num_output < self.num_protected or bool(self.num_pending and self.is_ending)

    @property
    def is_ending(self) -> bool:
        """Whether the tokens that are on their way are the last: nothing more is to be scheduled."""
        return self.num_output + self.num_pending >= self.params.max_tokens
