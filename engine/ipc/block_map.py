"""Map of an engine's KV blocks: the answer to `AskBlocks`."""

from dataclasses import dataclass


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
