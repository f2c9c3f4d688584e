"""Plan of one step (`StepPlan`, scheduler to runner), its result (`StepResult`, runner to scheduler), and the
outputs of requests that follow from it, with the finish reasons that token ids decide; and the interfaces to
the code that executes steps, synchronous or as micro-batches in flight.

Stop strings are checked by the daemon, which knows the text.

Pipeline stages run in parallel only with steps that do not depend on each other, and a row depends on the
step that samples the token before it. So decoding requests are distributed in turn over as many steps
(micro-batches) as there are stages:

    stage 0   A   B   A'  B'  A"          A and B: steps of different requests
    stage 1       A   B   A'  B'          A': the next tokens of the requests of A
"""

import operator
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ..errors import GrammarError
from ..ipc.messages import RequestOutput, TokenLogprobs
from .request import Request

ImagePiece = tuple[bytes, int, int]
"""Rows of an image that a step computes: content hash, the first, one after the last."""


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
    """Grammar masks after the first drafts, for runners that sample all rows of a step at once and for
    workers; drafts behind them cannot be accepted. Empty where the grammar itself is asked."""
    end: int = field(init=False)
    """Position after the last row; without drafts the position of the sampled token."""

    def __post_init__(self) -> None:
        self.end = self.start + self.num_tokens

    def num_rejected(self, taken: int) -> int:
        """Return how many draft tokens were rejected, if the step sampled `taken` tokens for the row."""
        return 1 + len(self.drafts) - taken if self.drafts else 0


def schedule_tokens(request: Request, tokens: int, remaining: int) -> ScheduledRequest:
    """Schedule the next `tokens` of the `remaining` ones and count them as scheduled in `request`."""
    samples = tokens == remaining and not request.pools
    row = ScheduledRequest(request, request.num_scheduled, tokens, samples, request.admissions)
    request.num_scheduled += tokens
    if samples:
        request.num_pending += 1
    return row


@dataclass(slots=True)
class StepPlan:
    """Work of one step: rows of prefill and decode together, within the token budget.

    `copies` are (source, destination) blocks to copy before anything is written: copy-on-write of a
    partly filled block. `state_copies` are slots of recurrent state to copy then, one after another. Every
    block that `rows` need is already in the requests' block tables. `adapter_loads` are (slot, folder) of
    adapters to load before that. `embeddings` are those of images, on ranks without the vision tower.
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


@dataclass(slots=True)
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
    """Fixed-point sums of the hidden states of this step's rows (`runner/prompt_results.py`), of pooling
    requests."""
    accepted: dict[str, list[SampledToken]] = field(default_factory=dict)
    """Tokens before the last one: accepted drafts."""

    def tokens_of(self, row: ScheduledRequest) -> list[SampledToken]:
        """Return all tokens that were sampled for the row, in order."""
        if not row.samples:
            return []
        name = row.request.request_id
        return [*self.accepted.get(name, ()), self.tokens[name]]

    def add(self, more: "StepResult") -> None:
        """Add results of the same step."""
        self.tokens.update(more.tokens)
        self.prompt_logprobs.update(more.prompt_logprobs)
        self.failed.update(more.failed)
        self.pooled.update(more.pooled)
        self.accepted.update(more.accepted)


UNIT: Final = 2.0**-30
"""Fixed-point unit of pooled sums: they are integers, so that their order does not matter."""


def add_up(sums: list[int], more: Iterable[int]) -> None:
    """Add `more` to `sums` in place, element by element; empty `sums` count as zeros."""
    sums[:] = map(operator.add, sums, more) if sums else more


def as_vector(sums: Sequence[int], rows: int) -> bytes:
    """Return the mean of `rows` rows from their fixed-point sums, as little-endian float32 bytes."""
    vector = array("f", (units * UNIT / rows for units in sums))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


def finish_reason(request: Request) -> str | None:
    """Return `stop`, `length`, or None for a request that continues.

    The context limit needs no check: admission has proved prompt + max_tokens <= context.
    """
    if request.pools:
        return None
    outputs = request.num_output
    if is_stop(request, request.token_ids[-1], outputs):
        return "stop"
    return "length" if outputs >= request.params.max_tokens else None


def is_stop(request: Request, token: int, outputs: int) -> bool:
    """Return True if the token ends the request. `outputs`: number of its output tokens, with this one."""
    # The sampler bans stop tokens among the first `min_tokens`.
    return token in request.params.stop_token_ids and outputs > request.params.min_tokens


def make_token_output(
    request: Request, sampled: Sequence[SampledToken], reason: str | None, drafts: Sequence[int] = ()
) -> RequestOutput:
    """Make the output for the tokens just appended; the first one also has the fields that are sent once.

    `drafts`: tokens that the step verified.
    """
    ids = [each.token_id for each in sampled]
    answer = RequestOutput(request_id=request.request_id, token_ids=ids, finish_reason=reason)
    if sampled[0].logprobs is not None:
        answer.logprobs = [each.logprobs for each in sampled if each.logprobs is not None]
    if reason == "stop":
        answer.stop_token_id = ids[-1]
    if drafts:
        answer.draft_tokens, answer.accepted_tokens = len(drafts), count_accepted(ids, drafts)
    if not request.first_output_sent:
        _add_first_output_fields(request, answer)
        if request.params.prompt_logprobs is not None and request.num_output == len(ids):
            answer.prompt_logprobs = [None, *request.prompt_logprobs]
    return answer


def count_accepted(ids: Sequence[int], drafts: Sequence[int]) -> int:
    """Return how many draft tokens equal the tokens that their step sampled."""
    return sum(map(operator.eq, ids, drafts))


def make_pooling_output(request: Request) -> RequestOutput:
    """Make the output of a pooling request from the sums over its whole prompt."""
    rows = request.num_prompt if request.params.pooling == "mean" else 1
    vector = as_vector(request.pooled, rows)
    answer = RequestOutput(request_id=request.request_id, finish_reason="stop", vector=vector)
    _add_first_output_fields(request, answer)
    return answer


def _add_first_output_fields(request: Request, answer: RequestOutput) -> None:
    request.first_output_sent = True
    answer.cached_tokens = request.num_cached
    answer.disk_tokens = request.num_disk
    answer.host_tokens = request.num_host
    answer.looked_up_tokens = request.num_prefix_lookup_tokens
    answer.prefix_end = request.prefix_end
    answer.scheduled_at = request.scheduled_at


def make_error_output(request_id: str, code: str, message: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error_code=code, error_message=message)


def make_failure_output(request: Request, message: str) -> RequestOutput:
    """Make the error output of a row without a token. A grammar's problem takes precedence over the sampler's
    `message`, because it is the cause.
    """
    problem = None if request.constraint is None else request.constraint.problem
    if problem is not None:
        return make_error_output(request.request_id, GrammarError.code, problem)
    return make_error_output(request.request_id, "invalid_logits", message)


@dataclass(frozen=True, slots=True)
class PipelineDepth:
    """Number of steps in flight that a scheduler has to plan for."""

    stages: int = 1
    """Number of steps that are computed at the same time."""
    ahead: int = 1
    """Tokens of a request that may be unknown when its next one is scheduled: 0 if the host must know all of
    them, 1 if a sampled token stays on the device."""

    def share(self, total: int) -> int:
        """Return the largest share of tokens or requests that are divided over the stages' steps."""
        return ceil_div(total, self.stages)


ONE_STAGE = PipelineDepth()


def ceil_div(total: int, parts: int) -> int:
    """Return ceil(total / parts): the largest share of tokens or requests that are divided over `parts`
    steps.
    """
    return -(-total // parts)


class MicroBatcher:
    """Chooses the decoding requests of each step. It is the only writer of `Request.turn`."""

    def __init__(self) -> None:
        self._number = 1
        """Number of the step that is scheduled next."""

    def next_microbatch(self, decoding: list[Request], pipeline: PipelineDepth) -> list[Request]:
        """Return the requests of `decoding` for the next step: an equal share of those whose last token is
        known, or will be when the step runs.
        """
        if pipeline.stages == 1:
            return decoding
        latest = self._number - pipeline.stages
        ready = (
            request
            for request in decoding
            if request.num_pending == 0 or (request.turn <= latest and request.num_pending <= pipeline.ahead)
        )
        return self._share(ready, len(decoding), pipeline.stages)

    def fill_bubble(self, decoding: list[Request], pipeline: PipelineDepth) -> list[Request]:
        """Return requests for a step that would be empty: they wait for an earlier step, but not for the
        host.
        """
        ready = (request for request in decoding if request.num_pending <= pipeline.ahead)
        return self._share(ready, len(decoding), pipeline.stages)

    def record(self, plan: StepPlan) -> None:
        """Record that `plan` is scheduled."""
        for row in plan.rows:
            row.request.turn = self._number
        self._number += bool(plan.rows)

    def _share(self, ready: Iterable[Request], decoding: int, stages: int) -> list[Request]:
        """Return an equal share of `ready`, longest waiting first: `stages` consecutive steps take every
        request once.
        """
        size = max(1, (decoding + self._number % stages) // stages)
        return sorted(ready, key=lambda request: request.turn)[:size]


class TimedHead(Protocol):
    """Model with an output head."""

    head: Any
    times_head: bool
    """True while the head runs by itself, so that its time can be told."""

    def logits(self, hidden_RE: Any, adapted: Any = None) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRunner:
    """Parts of a runner that a profile of steps times."""

    ops: Any
    """`Ops`, whose kernels are timed."""
    forward: Callable[..., Any]
    """Method that computes the hidden states."""
    model: TimedHead | None = None
    sampling: Sequence[Callable[..., Any]] = ()
    """Methods of the sampler."""


class ModelRunner(Protocol):
    """Owner of the model and the KV memory; it knows no queues."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy the plan's blocks, compute and write the KV of every row, sample where `row.samples`.

        Reads requests and never changes them. If it raises, the step counts as not done.
        """
        ...

    def profiled(self) -> ProfiledRunner: ...


class Executor(Protocol):
    """Asynchronous execution of steps: the device computes while the engine schedules.

    Steps run on the device in the order of their launches. KV and sampled tokens of earlier steps are read on
    the device: at launch `row.request.token_ids` may still lack them.
    """

    depth: int
    """Number of steps that may be launched before the results of an older one are collected."""
    stages: int
    """Number of pipeline stages, each with other layers: so many of the launched steps run at once."""

    def launch(self, plan: StepPlan) -> Any:
        """Start the step and return a handle for `collect` without waiting."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for the step and return its result. Call it once per handle, in the order of launches.

        If `launch` or `collect` raises, no step that is not collected yet counts as done.
        """
        ...

    def prepare(self) -> bool:
        """Do one piece of idle-time work that makes later steps faster; False when nothing is left."""
        ...

    def profiled(self) -> ProfiledRunner:
        """Return the parts of the runner in this process."""
        ...


class SyncExecutor:
    """Synchronous executor over a `ModelRunner`: a step is complete when `launch` returns."""

    depth = 0
    stages = 1

    def __init__(self, runner: ModelRunner, prepare: Callable[[], bool] = bool) -> None:
        """`prepare`: idle-time work of the runner, if it has some."""
        self.runner = runner
        self._prepare = prepare

    def launch(self, plan: StepPlan) -> StepResult:
        return self.runner.execute(plan)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def prepare(self) -> bool:
        return self._prepare()

    def profiled(self) -> ProfiledRunner:
        return self.runner.profiled()


def pipeline_of(runner: Executor) -> PipelineDepth:
    """Return the executor's stages and how many tokens of a request may be unknown at scheduling.

    Steps launched beyond one per stage are launched before the host knows the tokens they need.
    """
    return PipelineDepth(runner.stages, runner.depth + 1 - runner.stages)
