"""What one step is (`StepPlan`, scheduler to runner) and what it gave (`StepResult`, runner to scheduler)."""

from array import array
from dataclasses import dataclass, field

from .messages import TokenLogprobs
from .request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """Compute `num_tokens` tokens of `request`, from position `start` on. Not changed once it is made.

    Those beyond `request.token_ids` are known to the runner only: it sampled them in steps before.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the last row's logits give a new token (otherwise the prompt goes on next step, or a vector
    is wanted and no token)."""
    admission: int = 0
    """`request.admissions` when it was scheduled."""

    @property
    def end(self) -> int:
        """Also the position of the token that is sampled."""
        return self.start + self.num_tokens


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
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """For requests that asked: entries of the prompt positions `start + 1 .. end` computed in this step
    (the logprob of prompt token i comes from the row of token i - 1)."""
    failed: dict[str, str] = field(default_factory=dict)
    """Rows that cannot be sampled or pooled (NaN): message by request."""
    pooled: dict[str, "array[int]"] = field(default_factory=dict)
    """Sums of the states of this step's rows (`pooling.py`), of requests whose vector is wanted."""
