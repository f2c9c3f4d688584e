"""Messages about an engine, made on request: time of its steps by kind, a map of its KV blocks, and rows of
weights in blocks.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class AskProfile:
    """Start to profile steps, for `seconds` at most, or end it (0). Answered with a `StepProfile`."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShare:
    """Time of the operations of one kind, in seconds."""

    name: str
    seconds: float
    waited: float
    """Part in which a thread waited for slower ones, mean of the threads."""
    floor: float
    """Time that reading the weights or multiplying takes at `read_rate` and `product_rate`, the longer of
    both for each operation; 0: not known."""
    reading: float
    """Part of `floor` in which reading takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Parts of the time between two `AskProfile` in seconds: `spans` and `kernels` add up to `seconds`."""

    is_on: bool
    """True for the answer to a start, which only has the rates."""
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    spans: dict[str, float] = field(default_factory=dict)
    """Seconds by part of the engine, without those in kernels. Only the output head's include its kernels."""
    kernels: list[KernelShare] = field(default_factory=list)
    """Time by kind of operation, the output head's left out of `seconds`."""
    threads: int = 0
    read_rate: float = 0.0
    """Bytes a second at which all threads read packed weights, measured at the start; 0: not known."""
    product_rate: float = 0.0
    """Products a second of linears whose weights are in caches, measured at the start; 0: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Run of consecutive KV blocks with the same state, owner and holders."""

    count: int
    state: str
    """`live`, `cached` or `free`."""
    owner: int
    """Index into `BlockMap.owners`: the first holder of live blocks, the request that computed cached ones;
    -1 if not known."""
    holders: int
    """Number of block tables that each live block is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHolder:
    """Running request and the size of its block table."""

    request_id: str
    blocks: int
    shared: int
    """Number of its blocks that are in other block tables too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixUse:
    """Cached prefix that was hit, and how often."""

    prefix: str
    """Identifier: start of the chain hash, which reveals nothing about the tokens."""
    tokens: int
    blocks: int
    hits: int
    last_request: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """State of all KV blocks, by block number. Owners are ids of requests."""

    block_size: int
    num_blocks: int
    runs: list[BlockRun]
    owners: list[str]
    holders: list[BlockHolder]
    prefixes: list[PrefixUse]
    """Prefixes that are still cached, those that saved most tokens first."""
    evictions: int
    """Number of cached blocks evicted since the engine started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRows:
    """Request for rows of a matrix in a GGUF file, dequantized. Answered with `WeightRows`.

    It says where the matrix is, so that no step waits while the engine reads the file's header.
    """

    file: str
    tensor: str
    dtype: str
    """Type of its blocks, as in the file."""
    shape: tuple[int, ...]
    offset: int
    """First byte of the matrix in the file."""
    nbytes: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRows:
    asked: AskRows
    rows: list[list[float]]
    """Empty if they cannot be read."""


EngineAnswer = BlockMap | StepProfile | WeightRows
