"""Messages between daemon and engine, one plain dataclass each; `channel.py` encodes them.

They need no msgspec, so that a model can run where only torch is installed.
A request message has everything needed to resume after an engine died: see `AddRequest.output_ids`.
"""

from dataclasses import dataclass, field
from typing import Literal

from ..config import EngineConfig
from ..sampling_params import Pooling, SamplingParams
from .handover_messages import HandedBlocks, Prefill, TakenSlots
from .profile_messages import AskProfile, AskRows, EngineAnswer
from .sequence_times import SequenceTimes, StepWork

PrefixMissReason = Literal[
    "off", "prompt_logprobs", "pooling", "short", "complete", "new", "diverged", "evicted", "namespace",
    "state", "late", "damaged",
]  # fmt: skip
"""Reason why the prefix cache covered no more of a prompt.

    off               the cache is off
    prompt_logprobs   prompt log-probabilities need every prompt row computed
    pooling           pooling over all rows needs every row computed
    short             no whole block before the last token, whose logits must be computed
    complete          every block that was looked up was found
    new               the first block was never computed
    diverged          the blocks before were found, this one was never computed
    evicted           the block was cached and has been evicted
    namespace         another namespace (another key, another `cache_salt`) computed the same first block
    state             the recurrent state at the end of the known blocks was not kept
    late              the next block is on disk, which took too long to read it
    damaged           the next block was on disk, and its file was damaged
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load a model and become ready. The first message."""

    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """Image of a prompt, decoded, resized and cut into tiles as the model's processor does."""

    content_hash: bytes
    """sha256 over the pixels and the facts of preprocessing: equal hashes mean equal embeddings."""
    tiles: list[tuple[int, int]]
    """(height, width) of each tile."""
    pixels: bytes
    """RGB of all tiles one after another, row by row, one byte a color. Empty: those of `KeepImages`."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of embeddings, for models with M-RoPE."""
    size: tuple[int, int] = (0, 0)
    """Width and height before it was resized, for models that leave out the rows of a canvas's padding."""
    start: int = 0
    """Position of its first token in the prompt."""
    num_tokens: int = 0
    """Tokens from the first to the last one with an embedding; some between them may be text."""
    num_rows: int = 0
    """Tokens with an embedding."""

    @property
    def is_grid(self) -> bool:
        """True if its tokens are the rows of `grid`, without text between them."""
        return self.grid[0] * self.grid[1] == self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """Generate a sequence, or with `SamplingParams.pooling` an embedding of the prompt.

    `output_ids` are tokens that an earlier engine delivered already: generation continues after them, and
    they count as output for penalties, `max_tokens` and `min_tokens`.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0
    """Priority; lower is served first, as in vLLM. It selects the band (`core/request_queue.py`)."""
    tenant: str = ""
    """Id of the caller's key, or empty: callers get equal shares of the engine (`core/request_queue.py`)."""
    cache_namespace: str = ""
    """Namespace inside which prefix-cache blocks are shared (per-key salt, `cache_salt`)."""
    adapter: str = ""
    """Folder of a LoRA adapter, named by a digest of its content; empty: none."""
    fork_of: str | None = None
    """Id of a request of the same `n > 1` call, whose prompt blocks may be shared copy-on-write."""
    images: list[PreparedImage] = field(default_factory=list)
    """Images, in the order of their places in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepImages:
    """Images that requests to come refer to by their hash, and those that none refers to any more."""

    images: list[PreparedImage] = field(default_factory=list)
    drop: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Texts of all token ids. Sent before the first request with a grammar."""

    data: bytes
    """Concatenated bytes of all tokens."""
    sizes: list[int]
    """Number of bytes of each token."""
    special: list[int]
    """Ids of special tokens, which are no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Remove a request and free its blocks."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Liveness probe, answered with `Pong` between two steps: it proves that the step loop runs."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskBlocks:
    """Request for a `BlockMap`, answered between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Exit the engine process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of loading. `done` and `total` count compile steps or bytes of weights; 0 if not known."""

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
    """Name of the kernels that run, such as `reference` or `triton`."""
    kernels_problem: str = ""
    """Reason why these run instead of faster ones, also in `notes`; empty if the best do."""
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
    """Number of requests of full context that fit in the KV pool at once."""
    load_seconds: float
    measured_weights_bytes: int | None = None
    """Memory that the weights took when loaded; `weights_bytes` is the plan."""
    quant: str = "none"
    """Format of the weights; `dtype` is the dtype of activations."""
    tp: int = 1
    """Tensor-parallel size. Sizes in bytes are sums over all ranks."""
    pp: int = 1
    """Pipeline-parallel size."""
    expert_parallel: bool = False
    """True if the ranks of a stage have whole experts."""
    redundant_experts: int = 0
    state_slots: int = 0
    """Slots of recurrent state; 0 for a model without."""
    state_bytes: int = 0
    gpus: tuple[int, ...] = ()
    """Index of the visible GPU of each rank."""
    worker_pids: tuple[int, ...] = ()
    """Process ids of the ranks after the first."""
    notes: tuple[str, ...] = ()
    """Decisions made at load, such as a lowered context, with their reasons."""
    hidden_size: int = 0
    """Dimension of an embedding."""
    num_labels: int = 0
    """Labels of a reranker or classifier whose head the engine runs; `pooling` is then `classify`."""
    pooling: Pooling = "mean"
    """Default pooling, as the model's folder declares it or else by its kind."""
    pooling_problem: str = ""
    """Reason why the model gives no embeddings; empty if it does."""
    generates: bool = True
    """True if the model generates text; False if it only gives embeddings."""
    image_problem: str = "it is a language model without a vision tower"
    """Reason why the model cannot read images; empty if it does."""
    image_token_id: int = -1
    """Token id of rows that take the embeddings of an image."""
    vision_bytes: int = 0
    """Part of `weights_bytes` that the vision tower takes."""
    image_cache_bytes: int = 0
    """Size of the cache of encoded images, which `workspace_bytes` counts."""
    disaggregate: tuple[int, int] | None = None
    """Cores of the prefill engine and of the decode engine; None: one engine does both."""
    token_budget: int = 0
    """Maximum tokens computed in one step; 0: not known."""
    mixed_budget: int = 0
    """Maximum tokens of a step with decoding requests; 0: `token_budget`."""
    prefill_bytes: int = 0
    """Memory of the prefill engine and of the hand-over, which `workspace_bytes` counts."""
    expert_bytes: int = 0
    """Main memory, not in `weights_bytes`, of experts that the CPU computes beside a GPU; 0: none."""
    expert_quant: str = "none"
    """Format of these experts."""
    host_bytes: int = 0
    """Most main memory that a model on a GPU takes: `expert_bytes`, and KV blocks that the GPU evicts."""

    def step_tokens(self, rows: int) -> int:
        """Return the maximum tokens of a step with `rows` decoding requests; 0: not known."""
        return (rows and self.mixed_budget) or self.token_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Model is loaded; requests may be sent."""

    info: ModelInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed:
    """Model cannot be served; the process exits after this. `code` is `EngineError.code`, as `bad_model`."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position. `top` holds (id, logprob), best first."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token by probability, from 1 for the most likely one."""
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """Output of one step for one request. The last one of a request has a `finish_reason`.

    Not frozen, because one is made for each token: a frozen dataclass takes three times as long to make.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, None for the first; sent with the first output."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`."""
    stop_token_id: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; sent with the first output."""
    disk_tokens: int | None = None
    """Tokens of `cached_tokens` that came from the KV cache on disk; sent with the first output."""
    host_tokens: int | None = None
    """Tokens of `cached_tokens` that came from main memory to a GPU; sent with the first output."""
    looked_up_tokens: int | None = None
    """Prompt tokens looked up: those in whole blocks before the last token; sent with the first output."""
    prefix_end: PrefixMissReason | None = None
    """Reason why the cache covered no more, sent with the first output; for the operator, not for clients."""
    scheduled_at: float | None = None
    """CLOCK_MONOTONIC seconds when prefill began; sent with the first output."""
    draft_tokens: int = 0
    """Draft tokens that the step verified for it."""
    accepted_tokens: int = 0
    """Number of them that were accepted, all of which are in `token_ids`."""
    vector: bytes | None = None
    """Embedding of the prompt, if `SamplingParams.pooling` is set: little-endian float32, not normalized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Drafts of one method that were verified."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Gauges of the current state, and counters since the engine process started. Not changed once made."""

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
    disk_hits: int = 0
    """Tokens of `prefix_hits` that came from the KV cache on disk."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_damaged: int = 0
    disk_late: int = 0
    """Requests that no longer waited for the disk."""
    disk_skipped: int = 0
    """Blocks that were not written: evicted before, or refused by the disk."""
    host_hits: int = 0
    """Tokens of `prefix_hits` that came from main memory to a GPU."""
    host_saved_bytes: int = 0
    host_loaded_bytes: int = 0
    host_skipped: int = 0
    preemptions: int = 0
    slots_used: int = 0
    """KV slots that hold a token; the rest of the `blocks_used * block_size` slots is waste."""
    step_seconds: float = 0.0
    """Time spent inside steps."""
    work: StepWork = field(default_factory=StepWork)
    prefill_done: int = 0
    """Tokens computed so far of the prompts that are under way."""
    drafts: int = 0
    """Number of drafts that were verified (`engine/core/speculation/draft_scheduler.py`)."""
    draft_tokens: int = 0
    """Number of draft tokens in them."""
    accepted_tokens: int = 0
    """Number of accepted draft tokens: each saved its request a step."""
    draft_methods: dict[str, DraftCounts] = field(default_factory=dict)
    """These three by method (`DraftMethod`), for methods that have proposed any."""
    expert_rows: int = 0
    """Rows that layers of experts gave to an expert, on a CPU; with stages those of the first."""
    expert_imbalance: float = 0.0
    """Rows of the busiest expert of a layer over the mean of its experts, as the mean of all layers."""
    expert_rank_imbalance: float = 0.0
    """The same of ranks that have whole experts, since the load or the last of `expert_moves`."""
    expert_rank_imbalance_without_copies: float = 0.0
    """The same of these rows without copies of hot experts (`--redundant-experts`)."""
    expert_moves: int = 0  # of a layer's experts to another rank, since the load
    adapters: list[str] = field(default_factory=list)
    """Digests of the LoRA adapters in memory."""
    handed_tokens: int = 0
    """Tokens whose KV came from the prefill engine (`--disaggregate`)."""
    handed_damaged: int = 0
    """Blocks of it that were refused: torn, or of other tokens."""
    prefill_restarts: int = 0
    prefill_pid: int = 0
    """Process of the prefill engine; 0: there is none, or it is being started."""


@dataclass(slots=True, kw_only=True)
class StepOutputs:
    """Outputs of one step, and the engine's state after it."""

    outputs: list[RequestOutput]
    stats: EngineStats
    times: dict[str, SequenceTimes] = field(default_factory=dict)
    """Times of the sequences that ended, by request id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Answer to a `Ping` with the same nonce."""

    nonce: int
    stats: EngineStats


Question = Ping | AskBlocks | AskProfile | AskRows
ToEngine = (
    Start | Vocabulary | KeepImages | AddRequest | AbortRequest | Question | Shutdown | Prefill | TakenSlots
)
ToDaemon = Progress | Ready | LoadFailed | StepOutputs | Pong | EngineAnswer | HandedBlocks
