"""What one step is (`StepPlan`, scheduler to runner) and what it gave (`StepResult`, runner to scheduler)."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ipc.messages import TokenLogprobs
from .request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """Compute `num_tokens` tokens of `request`, from position `start` on. Not changed once it is made.

    Those beyond `request.token_ids` are the drafts; without drafts they are known to the runner only, which
    sampled them in steps before.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the last row's logits give a new token (otherwise the prompt goes on next step, or a vector
    is wanted and no token)."""
    admission: int = 0
    """`request.admissions` when it was scheduled."""
    drafts: Sequence[int] = ()
    """Guesses at the tokens after those of `request`, computed with them. Each row from the last known token
    on gives a token, as long as the guess before it came true."""

    @property
    def end(self) -> int:
        """Also the position of the token that is sampled, where there are no drafts."""
        return self.start + self.num_tokens

    def num_void(self, taken: int) -> int:
        """Tokens that were computed in vain, where the row gave so many: drafts that did not come true."""
        return 1 + len(self.drafts) - taken if self.drafts else 0


def planned(request: Request, tokens: int, remaining: int) -> ScheduledRequest:
    """The next `tokens` of the `remaining` ones, booked as launched."""
    samples = tokens == remaining and not request.pools
    row = ScheduledRequest(request, request.num_scheduled, tokens, samples, request.admissions)
    request.num_scheduled += tokens
    if samples:
        request.num_pending += 1
    return row


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows of all phases together, at most a token budget of them.

    `copies` are (source, destination) blocks to copy before anything is written: copy-on-write of a
    partly filled block. Every block needed by `rows` is already in the requests' block tables.
    """

    rows: list[ScheduledRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Keys are request ids. A sampling row is in exactly one of `tokens` and `failed`."""

    tokens: dict[str, SampledToken] = field(default_factory=dict)
    """The last token that each got."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """For requests that asked: entries of the prompt positions `start + 1 .. end` computed in this step
    (the logprob of prompt token i comes from the row of token i - 1)."""
    failed: dict[str, str] = field(default_factory=dict)
    """Rows that cannot be sampled or pooled (NaN): message by request."""
    pooled: dict[str, "array[int]"] = field(default_factory=dict)
    """Sums of the states of this step's rows (`pooling.py`), of requests whose vector is wanted."""
    accepted: dict[str, list[SampledToken]] = field(default_factory=dict)
    """Tokens before the last one: drafts that came true."""

    def tokens_of(self, row: ScheduledRequest) -> list[SampledToken]:
        """All that the row gave, in order."""
        if not row.samples:
            return []
        name = row.request.request_id
        return [*self.accepted.get(name, ()), self.tokens[name]]
