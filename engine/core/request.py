"""State of a request inside the engine: a few counters, everything else derived from them.

token_ids = prompt + output so far
0 ........ num_computed ....... num_scheduled ........ num_tokens ......... + num_pending
   KV is in the pool    in launched steps     to compute          sampled there, not known here yet

Where steps run one at a time, no launched step is open at scheduling: num_scheduled equals num_computed, and
num_pending is 0. The last token's logits give the next token.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..errors import InvalidRequest
from ..ipc import MAX_FRAME
from ..ipc.messages import AddRequest, ModelInfo, PrefixMissReason, PreparedImage, TokenLogprobs
from ..sampling_params import SamplingParams
from .constraints.output_constraint import OutputConstraint
from .speculation.draft_choice import RequestDrafts

if TYPE_CHECKING:
    from .request_queue import Flow
    from .step_ledger import SequenceClock


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Request:
    """State of one sequence. The scheduler is its only writer; the runner reads."""

    request_id: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    """Id of the caller, for fair shares; see `AddRequest.tenant`."""
    cache_namespace: str = ""
    adapter: str = ""
    """Folder of its LoRA adapter; empty: none."""
    adapter_slot: int = -1
    """Slot of its adapter while it runs; -1: none. `AdapterSlots` writes it."""
    fork_of: str | None = None
    short_context: int = 0
    """Value of `SchedulerConfig.short_context`; `choose_factors` writes it."""
    is_long: bool = False
    """True if it is longer than that: all its tokens then have LongRoPE's long factors. Constant during an
    admission; `choose_factors` writes it."""
    images: Sequence[PreparedImage] = ()
    """Images in the order of their places; `images.py` schedules them."""
    arrived_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_scheduled: int = 0
    num_pending: int = 0
    admissions: int = 0
    """Epoch: number of times the request was admitted or stopped running. A row of a launched step with
    another epoch is stale."""
    turn: int = 0
    """Number of the last step with a row of this request (`MicroBatcher`)."""
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache at first admission; None before it."""
    num_prefix_lookup_tokens: int = 0
    """Prompt tokens in whole blocks that were looked up in the prefix cache at first admission."""
    prefix_end: PrefixMissReason | None = None
    """Reason why the prefix cache covered no more of the prompt."""
    num_disk_blocks: int = 0
    """Blocks of it that were read from disk before its admission (`KVTiers`)."""
    num_disk: int = 0
    """Tokens of `num_cached` that came from disk."""
    num_host_blocks: int = 0
    """Blocks of it that were copied from the host tier before its admission."""
    num_host: int = 0
    """Tokens of `num_cached` that came from there."""
    disk_end: PrefixMissReason | None = None
    """Reason why no more of it came from disk, where the disk had more."""
    reads_later: bool = False
    """True if host or disk may have blocks of it that memory has not, which its admission is to wait for."""
    num_handovers: int = 0
    """Times that the prefill engine was asked for it since it was queued (`handover.py`)."""
    num_known: int | None = None
    """Tokens that a prefix cache had before the prefill engine computed the rest; None: it did not."""
    scheduled_at: float | None = None
    """Clock at first admission, in seconds; None before it."""
    preemptions: int = 0
    """Number of preemptions for running requests that needed a block."""
    displacements: int = 0
    """Number of preemptions for waiting requests."""
    clock: "SequenceClock | None" = None
    """Clock of its phases (`step_ledger.py`), from its arrival on; None in warm-ups."""
    flow: "Flow" = field(init=False)
    """Flow of its caller and band; set when the scheduler adds the request."""
    num_charged: int = 0
    """Tokens already charged to its flow."""
    num_protected: int = 0
    """Output length below which the request is not preempted."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Prefix-cache chain hash of each full block of `token_ids`, computed as far as needed."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Prompt log-probabilities, collected over the chunks of the prompt until the first output."""
    pooled: list[int] = field(default_factory=list)
    """Fixed-point sums of hidden states over the chunks of the prompt (`runner/prompt_results.py`), for
    pooling requests."""
    constraint: OutputConstraint | None = None
    """Position in its thoughts and its grammar, if one of them limits its tokens."""
    mask: bytes | None = None
    """Bit mask of the ids allowed as next token (`OutputConstraint.allowed`), for the step that draws it."""
    drafts: RequestDrafts | None = None
    """Success of its draft tokens, from its first decoding step that may have some on; written by
    `DraftScheduler`."""
    state_slot: int = -1
    """Slot of its recurrent state; -1: none. `StateManager` writes these three."""
    state_marks: tuple[int, ...] = ()
    """Positions of its prompt whose states are to be kept for the prefix cache, ascending."""
    answer_state: bytes | None = None
    """Chain hash under which the last state of its answer is kept."""
    window_table: list[int] = field(default_factory=list)
    """Blocks of sliding-window layers, 0 before `window_begin`; empty where they share `block_table`."""
    window_begin: int = 0
    """Index of the first block that its window needs. `WindowManager` writes both."""
    first_output_sent: bool = False
    """Set once the first output is made."""
    pools: bool = field(init=False)
    """True for embeddings: no token is sampled, and the request ends with the last row of its prompt."""
    edits_logits: bool = field(init=False)
    """True if a logits processor other than a mask changes its logits."""

    def __post_init__(self) -> None:
        self.pools = self.params.pooling is not None
        self.edits_logits = self.params.edits_logits
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)
        if not len(self.token_ids) >= len(self.prompt_ids) > 0:
            raise InvalidRequest("the prompt has no tokens")

    def has_prompt_of(self, other: "Request") -> bool:
        """Return True if the prompts and their keys are the same, images and namespace included."""
        return (
            self.is_long == other.is_long
            and self.cache_namespace == other.cache_namespace
            and self.prompt_ids == other.prompt_ids
            and [each.content_hash for each in self.images] == [each.content_hash for each in other.images]
        )

    @property
    def outgrows_factors(self) -> bool:
        """True if the sequence is now too long for the LongRoPE factors that its keys are computed with."""
        return 0 < self.short_context < self.num_tokens and not self.is_long

    @property
    def num_short(self) -> int:
        """Number of tokens that may be computed before the LongRoPE factors change."""
        return sys.maxsize if self.is_long or not self.short_context else self.short_context

    def choose_factors(self, short_context: int) -> None:
        """Take the factors of its length. Call it without blocks: none of them would be right after it."""
        self.short_context = short_context
        if self.outgrows_factors:
            self.is_long = True
            self.block_hashes.clear()

    def append(self, ids: Sequence[int]) -> None:
        """Append the tokens that one step sampled for it, one or more."""
        self.token_ids += ids
        self.num_pending -= 1

    def update_mask(self) -> None:
        """Compute `mask` for the next token. With a token before it unknown there is none (see
        `needs_all_tokens`).
        """
        if self.constraint is not None:
            self.mask = None if self.num_unknown else self.constraint.allowed(self.token_ids)

    @property
    def sliding_table(self) -> list[int]:
        """Block table of sliding-window layers. A request without one, as in warm-ups, uses its full block
        table.
        """
        return self.window_table or self.block_table

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def has_computed_prompt(self) -> bool:
        """True if the KV of the whole prompt is in the pool."""
        return self.num_computed >= self.num_prompt

    @property
    def position_shift(self) -> int:
        """RoPE position of a token after all images less its place, for models with M-RoPE: see
        `runner/image_rows.py`.
        """
        sizes = ((max(each.grid), each.num_tokens) for each in self.images if each.is_grid)
        return sum(longer - tokens for longer, tokens in sizes)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that are not scheduled yet: 1 while decoding, more while prefilling. Less while drafts are
        verified.
        """
        return len(self.token_ids) + self.num_pending - self.num_scheduled

    @property
    def num_output_before(self) -> int:
        """Number of output tokens before the one that the last scheduled step samples, known here or not."""
        return self.num_output + self.num_unknown

    @property
    def num_unknown(self) -> int:
        """Number of sampled tokens that only the device knows so far."""
        return max(0, self.num_pending - 1)

    @property
    def needs_all_tokens(self) -> bool:
        """True if the host must know the last token before the next one is sampled: a grammar reads it, the
        reasoning may be ended at it, or it may be the first token behind the short factors of LongRoPE, after
        which the request is computed again. Also true if drafts leave the number of tokens before it open.
        """
        if self.has_open_drafts or self.num_scheduled >= self.num_short:
            return True
        if self.constraint is None:
            return False
        return self.constraint.needs_all_tokens(self.token_ids, self.num_pending)

    @property
    def has_open_drafts(self) -> bool:
        """True if a launched step verifies draft tokens: it gives one token or more."""
        return self.num_pending > 0 and self.num_remaining < 1

    @property
    def keeps_place(self) -> bool:
        """True if the request must not be preempted for another: it was lifted by ageing and has not made its
        protected tokens, or its last tokens are in launched steps.
        """
        return self.num_output < self.num_protected or bool(self.num_pending and self.is_ending)

    @property
    def is_ending(self) -> bool:
        """True if launched steps sample its last tokens by `max_tokens`: nothing more is to be scheduled."""
        return self.num_output + self.num_pending >= self.params.max_tokens


def first_image(images: Sequence[PreparedImage], position: int) -> int:
    """Return the index of the first image that ends after a position; images are in order."""
    return bisect_right(images, position, key=lambda image: image.start + image.num_tokens)


_INTEGERS: Final = range(-(2**31), 2**31)
"""Range of token ids and counts: 32 bits. Ids in logit_bias, bad_words and the like may be outside the
vocabulary and are then ignored."""
_SEEDS: Final = range(-(2**63), 2**64)
_POOLINGS: Final = ("last", "mean", "cls")
_STEP_BYTES: Final = 1 << 20
"""Room in a message for what a step tells beside the log-probabilities of a prompt."""
_LOGPROB_BYTES: Final = (64, 16)
"""Most bytes of a message for each token of a prompt with log-probabilities, and for each alternative."""


def check_request(message: AddRequest, info: ModelInfo) -> None:
    """Raise InvalidRequest for the first value that the engine cannot compute with."""
    problem = next(_problems(message, info), None)
    if problem is not None:
        raise InvalidRequest(problem)


def _problems(message: AddRequest, info: ModelInfo) -> Iterator[str]:
    if not message.prompt_ids:
        yield "the prompt has no tokens"
    for name, ids in (("prompt", message.prompt_ids), ("output so far", message.output_ids)):
        low, high = min(ids, default=0), max(ids, default=0)
        if ids and not 0 <= low <= high < info.vocab_size:
            wrong = low if low < 0 else high
            yield f"token id {wrong} of the {name} is not in the model's vocabulary of {info.vocab_size}"
    params = message.params
    yield from _counts(params)
    yield from _ranges(params)
    yield from _ids(params)
    yield from _prompt_logprobs(message, info)
    if params.pooling is not None:
        yield from _pooling(message, info)
    elif not info.generates:
        yield "this model makes vectors and no text"


def _counts(params: SamplingParams) -> Iterator[str]:
    counts = {
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "top_k": params.top_k,
        "logprobs": params.logprobs or 0,
        "prompt_logprobs": params.prompt_logprobs or 0,
    }
    for name, value in counts.items():
        if not 0 <= value < _INTEGERS.stop:
            yield f"{name} is {value}, allowed are 0 to {_INTEGERS.stop - 1}"
    if params.seed not in _SEEDS:
        yield "the seed has more than 64 bits"


def _ranges(params: SamplingParams) -> Iterator[str]:
    ranges = (
        ("temperature", params.temperature, 0.0, math.inf),
        ("top_p", params.top_p, 0.0, math.inf),
        ("min_p", params.min_p, 0.0, 1.0),
        ("repetition_penalty", params.repetition_penalty, math.ulp(0.0), math.inf),
        ("presence_penalty", params.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", params.frequency_penalty, -math.inf, math.inf),
    )
    for name, value, low, high in ranges:
        if not (math.isfinite(value) and low <= value <= high):
            yield f"{name} is {value}"
    if not all(map(math.isfinite, params.logit_bias.values())):
        yield "a value of logit_bias is not a finite number"


def _ids(params: SamplingParams) -> Iterator[str]:
    listed: tuple[tuple[str, Iterable[int]], ...] = (
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("bad_words", (id_ for word in params.bad_words for id_ in word)),
    )
    for name, ids in listed:
        if any(id_ not in _INTEGERS for id_ in ids):
            yield f"{name} holds a number that is no token id"


def _prompt_logprobs(message: AddRequest, info: ModelInfo) -> Iterator[str]:
    if (wanted := message.params.prompt_logprobs) is None:
        return
    own, alternative = _LOGPROB_BYTES
    most = (MAX_FRAME - _STEP_BYTES) // (own + alternative * min(wanted, info.vocab_size))
    if (tokens := len(message.prompt_ids)) > most:
        yield (
            f"prompt_logprobs with {wanted} alternatives have room for a prompt of {most} tokens, this one "
            f"has {tokens}: ask for fewer alternatives or a shorter prompt"
        )


def _pooling(message: AddRequest, info: ModelInfo) -> Iterator[str]:
    params = message.params
    is_encoder = info.pooling in {"embed", "classify"}
    known = (info.pooling,) if is_encoder else _POOLINGS
    if params.pooling not in known:
        yield f"pooling {params.pooling!r} is not known of this model, only {', '.join(known)}"
    if params.pair_start is not None and not 0 < params.pair_start <= len(message.prompt_ids):
        yield f"pair_start {params.pair_start} is not within the {len(message.prompt_ids)} tokens"
    if info.pooling_problem:
        yield f"this model makes no vectors: {info.pooling_problem}"
    if params.max_tokens or message.output_ids:
        yield "a request for a vector has no output"
    if params.grammar is not None or params.logprobs is not None or params.prompt_logprobs is not None:
        yield "a request for a vector has neither a grammar nor log-probabilities"
