"""What daemon and engine say to each other: one dataclass for each thing asked or told.

Plain dataclasses, so that the engine runs where msgspec is absent; `codec.py` encodes them.
Every request carries all that is needed to go on after the engine died: see `AddRequest.output_ids`.
"""

from dataclasses import dataclass, field
from typing import Literal

from ..config import EngineConfig
from ..sampling_params import Pooling, SamplingParams

# --------------------------------------------------------------------------- daemon -> engine


PrefixMissReason = Literal[
    "off", "prompt_logprobs", "pooling", "short", "complete", "new", "diverged", "evicted", "namespace"
]
"""Why the cache gave no more of a prompt.

    off               the cache is off
    prompt_logprobs   they come from computing the whole prompt
    pooling           a vector of all rows comes from computing them
    short             no whole block before the last token, whose logits are wanted
    complete          every block that was looked up was there
    new               nobody computed such a first block
    diverged          the blocks before were there, this one never was
    evicted           it was there, and made room for others
    namespace         another namespace (another key, another `cache_salt`) computed the same first block
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message: load this model and become ready."""

    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """Generate a sequence, or with `SamplingParams.pooling` make a vector of the prompt.

    `output_ids` are tokens that an earlier engine already delivered: generation goes on after them and
    they count as output for penalties, `max_tokens` and `min_tokens`.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    """Lower is served first (vLLM's convention); bands are formed from it."""
    tenant: str = ""
    """Id of the caller's key, or empty: callers get equal shares of the engine (`fair_shares.py`)."""
    cache_namespace: str = ""
    """Prefix-cache blocks are shared only inside a namespace (per-key salt, `cache_salt`)."""
    fork_of: str | None = None
    """Sibling of the same `n > 1` call whose prompt blocks may be shared copy-on-write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What token ids stand for. Told before the first request that has a grammar."""

    data: bytes
    """UTF-8 of all tokens, one after the other."""
    sizes: list[int]
    """Bytes of each."""
    special: list[int]
    """Ids that are no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Answered with `Pong` between two steps: proves that the step loop turns."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskBlocks:
    """Answered with `BlockMap` between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    pass


# --------------------------------------------------------------------------- engine -> daemon


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Loading goes on. `done` and `total` count steps of a compile or bytes of weights; 0 where not known."""

    phase: Literal["kernels", "weights"]
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts of a loaded model that the daemon shows and checks requests against."""

    name: str
    architecture: str
    device: str
    dtype: str
    kv_dtype: str
    backend: str
    """Which kernels run: `reference`, later `cpu` or `triton`."""
    context_window: int
    vocab_size: int
    block_size: int
    num_blocks: int
    weights_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    workspace_bytes: int
    max_running: int
    max_concurrency: float
    """How many requests of full context fit in the KV pool at once."""
    load_seconds: float
    measured_weights_bytes: int | None = None
    """Memory that loading the weights really took; `weights_bytes` is what was planned."""
    quant: str = "none"
    """Format of the weights; `dtype` is what is computed in."""
    tp: int = 1
    pp: int = 1
    """Ranks that share each layer, and stages. Sizes are of all ranks together."""
    gpus: tuple[int, ...] = ()
    """Visible GPU of each rank."""
    worker_pids: tuple[int, ...] = ()
    """Processes of the ranks after the first."""
    notes: tuple[str, ...] = ()
    """What was decided or lowered at load, and why."""
    hidden_size: int = 0
    """Numbers of a vector."""
    pooling: Pooling = "mean"
    """How its vectors are made, as its folder declares or for want of that."""
    pooling_problem: str = ""
    """Why it makes none; empty where it does."""
    generates: bool = True
    """It makes text, and not only vectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """The model cannot be served; the process ends after this. `code` is a word such as `bad_model`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position. `top` holds (id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What one step gave one request. The last one carries `finish_reason`.

    Not frozen, as one is made for each token: a frozen dataclass takes three times as long to make.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first output: one entry a prompt token, None for the first."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`."""
    stop_token_id: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the prefix cache saved; sent with the first output."""
    looked_up_tokens: int | None = None
    """Prompt tokens that the prefix cache was asked for, which are those in whole blocks before the last
    token; sent with the first output."""
    prefix_end: PrefixMissReason | None = None
    """Why the cache had no more of them; sent with the first output. It may tell of other namespaces: for the
    operator, never for the client."""
    scheduled_at: float | None = None
    """CLOCK_MONOTONIC seconds when prefill began; sent with the first output."""
    vector: bytes | None = None
    """Of the prompt, where `SamplingParams.pooling` asks for it: little-endian float32, of any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of this moment and counters since the engine process started."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    preemptions: int = 0
    slots_used: int = 0
    """KV slots holding a token, of `blocks_used * block_size` reserved ones: the rest is waste."""
    step_seconds: float = 0.0
    """Time spent inside steps."""
    drafts: int = 0
    """Times that a request's guesses at its next tokens were verified (`engine/core/ngram_proposer.py`)."""
    draft_tokens: int = 0
    """Guessed tokens, of all those."""
    accepted_tokens: int = 0
    """Guessed tokens that were right: each spared its request a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """All that one step produced, and the engine's state after it."""

    outputs: list[RequestOutput]
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    nonce: int
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Neighbouring KV blocks of which the same can be said."""

    count: int
    state: str
    """`live`, `cached` or `free`."""
    owner: int
    """Index into `BlockMap.owners`: first holder of live ones, who computed cached ones; -1: not known."""
    holders: int
    """Block tables that live ones are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHolder:
    """A running request."""

    request_id: str
    blocks: int
    shared: int
    """Of these: in other block tables too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUse:
    """A prefix that the cache was found to hold, and how often."""

    prefix: str
    """Names it, by its chain hash: says nothing about the tokens."""
    tokens: int
    blocks: int
    hits: int
    last_request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """All KV blocks in the order of their numbers."""

    block_size: int
    num_blocks: int
    runs: list[BlockRun]
    owners: list[str]
    """Request ids."""
    holders: list[BlockHolder]
    prefixes: list[PrefixUse]
    """Those that saved most tokens first; only what is still cached."""
    evictions: int
    """Cached blocks given away since the engine started, as others needed them."""


ToEngine = Start | Vocabulary | AddRequest | AbortRequest | Ping | AskBlocks | Shutdown
ToDaemon = Progress | Ready | LoadFailed | StepOutputs | Pong | BlockMap
