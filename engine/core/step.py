"""Plan of one step (`StepPlan`, scheduler to runner) and its result (`StepResult`, runner to scheduler)."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ipc.messages import TokenLogprobs
from .request import Request

ImagePiece = tuple[bytes, int, int]
"""Rows of a picture that a step computes: content hash, the first, one after the last."""


@dataclass(slots=True)
class ScheduledRequest:
    """Rows of one request in a step: `num_tokens` tokens from position `start` on. Immutable by convention.

    Tokens beyond `request.token_ids` are the draft tokens. Without drafts they are known to the runner only,
    which sampled them in earlier steps.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """True if a token is sampled from the last row's logits; False if the prompt continues in the next step,
    or for embeddings."""
    admission: int = 0
    """Value of `request.admissions` when it was scheduled."""
    drafts: Sequence[int] = ()
    """Draft tokens after those of `request`, computed in the same step. Each row from the last known token on
    gives a token, as long as the draft before it is accepted."""
    saves: Sequence[tuple[int, int]] = ()
    """(position, slot): recurrent states to save after so many tokens, ascending; `start` < position <=
    `end`."""
    draft_masks: Sequence[bytes | None] = ()
    """Grammar masks after the first drafts, for runners that sample all rows of a step at once; those behind
    them cannot be accepted."""
    end: int = field(init=False)
    """Position after the last row; without drafts the position of the sampled token."""

    def __post_init__(self) -> None:
        self.end = self.start + self.num_tokens

    def num_rejected(self, taken: int) -> int:
        """Return how many draft tokens were rejected, if `taken` tokens came out of the row."""
        return 1 + len(self.drafts) - taken if self.drafts else 0


def schedule_tokens(request: Request, tokens: int, remaining: int) -> ScheduledRequest:
    """Schedule the next `tokens` of the `remaining` ones and count them as scheduled in `request`."""
    samples = tokens == remaining and not request.pools
    row = ScheduledRequest(request, request.num_scheduled, tokens, samples, request.admissions)
    request.num_scheduled += tokens
    if samples:
        request.num_pending += 1
    return row


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one step: rows of prefill and decode together, within the token budget.

    `copies` are (source, destination) blocks to copy before anything is written: copy-on-write of a
    partly filled block. `state_copies` are slots of recurrent state to copy then, one after another. Every
    block that `rows` need is already in the requests' block tables. `adapter_loads` are (slot, folder) of
    adapters to load before that. `embeddings` are those of pictures, on ranks without the vision tower.
    """

    rows: list[ScheduledRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    adapter_loads: list[tuple[int, str]] = field(default_factory=list)
    embeddings: dict[ImagePiece, bytes] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step, by request id. A sampling row is in exactly one of `tokens` and `failed`."""

    tokens: dict[str, SampledToken] = field(default_factory=dict)
    """Last sampled token of each request."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Prompt log-probabilities of the positions `start + 1 .. end` computed in this step, for requests that
    asked for them (the logprob of prompt token i comes from the row of token i - 1)."""
    failed: dict[str, str] = field(default_factory=dict)
    """Error messages of rows that cannot be sampled or pooled (NaN)."""
    pooled: dict[str, "array[int]"] = field(default_factory=dict)
    """Fixed-point sums of the hidden states of this step's rows (`runner/pooling.py`), of pooling
    requests."""
    accepted: dict[str, list[SampledToken]] = field(default_factory=dict)
    """Tokens before the last one: accepted drafts."""

    def tokens_of(self, row: ScheduledRequest) -> list[SampledToken]:
        """Return all tokens that the row gave, in order."""
        if not row.samples:
            return []
        name = row.request.request_id
        return [*self.accepted.get(name, ()), self.tokens[name]]
