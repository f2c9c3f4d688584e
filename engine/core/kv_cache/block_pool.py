"""Block pool: KV memory as fixed-size blocks with reference counts.

A block is always in exactly one of three states:

    free     no content worth keeping
    cached   in no block table, but in the prefix cache: allocated last, least recently used first
    used     in the block tables of `refs[block]` requests

A snapshot of all blocks and their holders is made on request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Final, Protocol

from ...ipc.profile_messages import BlockHolder, BlockMap, BlockRun
from ...kv_store.block_file import BlockKind, Checksums
from ..request import Request
from .prefix_cache import PrefixCache, PrefixHistory, PrefixUses


class BlockPool:
    """Pool of KV blocks: the only class that allocates and frees them."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = enable_prefix_cache
        self._refs = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))  # a stack: the last used block is still in CPU caches
        self._cache = PrefixCache()
        self.evictions = 0
        """Number of cached blocks that `allocate` evicted."""

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can allocate: free ones, then cached ones."""
        return len(self._free) + len(self._cache.idle)

    @property
    def num_cached(self) -> int:
        return len(self._cache.idle)

    @property
    def history(self) -> PrefixHistory:
        """Record of evicted and first blocks, which explains prefix-cache misses."""
        return self._cache.history

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def set_eviction_callback(self, on_evict: Callable[[int, bytes], None]) -> None:
        """Call `on_evict` with each block that is evicted from now on and its hash."""
        self._cache.on_evict = on_evict

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks of undefined content, each with one reference. At most `num_available`."""
        assert count <= self.num_available
        self.evictions += max(0, count - len(self._free))
        blocks = [self._free.pop() if self._free else self._cache.evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which are used already or were just found in the cache."""
        for block in blocks:
            if self._refs[block] == 0:
                self._cache.mark_referenced(block)
            self._refs[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a table. Tail first, so that the tail is evicted first: a
        prefix is of use without its tail, a tail alone is not.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._cache:
                    self._cache.mark_evictable(block)
                else:
                    self._free.append(block)

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, without a reference: `touch` them before the next
        `allocate`.
        """
        return self._cache.find(hashes)

    def is_cached(self, block: int) -> bool:
        """Return True if the block is in the prefix cache and in no block table."""
        return self._refs[block] == 0 and block in self._cache

    def has_prefix(self, block_hash: bytes) -> bool:
        return bool(self._cache.find((block_hash,)))

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks have no reference: they are available until they are touched."""
        return sum(self._refs[block] == 0 for block in blocks)

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Add a used block that is full and computed to the prefix cache."""
        assert self._refs[block] > 0
        self._cache.insert(block, block_hash)

    def uncache(self, blocks: Sequence[int]) -> None:
        """Remove these used blocks from the prefix cache, because their content may be wrong."""
        for block in blocks:
            assert self._refs[block] > 0
            self._cache.remove(block)

    def check(self) -> None:
        """Assert that free + cached + used = all. Walks the pool: for tests and idle moments."""
        free, cached = set(self._free), self._cache.check()
        used = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(used) == self.num_blocks
        assert len(free | cached | used) == self.num_blocks
        assert not any(map(self._cache.__contains__, free)), "a free block is still named"
        assert self.num_used == len(used)

    def check_holders(self, held: Mapping[int, int]) -> None:
        """Assert that the pool's reference counts equal `held`, the references of all block tables."""
        assert dict(held) == {block: refs for block, refs in enumerate(self._refs) if refs > 0}


class CopyEvent(Protocol):
    @property
    def is_done(self) -> bool:
        """True once the copies queued before the event are done."""
        ...

    def wait(self) -> None:
        """Block until the copies queued before the event are done."""
        ...


class BlockMemory(Protocol):
    """Copies between blocks on the device and host memory, in the order in which they are queued."""

    @property
    def sizes(self) -> Mapping[BlockKind, int]:
        """Bytes of one block of each kind that the model has."""
        ...

    def make_buffer(self, size: int) -> memoryview:
        """Allocate host memory that copies may use."""
        ...

    @property
    def checksums(self) -> Checksums:
        """Checksums of files, as fast as this machine can compute them."""
        ...

    def save(self, kind: BlockKind, index: int, into: memoryview) -> None:
        """Queue a copy to the host of a block that no launched step writes to. `record` must follow before a
        step that may.
        """
        ...

    def load(self, kind: BlockKind, index: int, data: memoryview) -> None:
        """Queue a copy into a block that no step reads before its event."""
        ...

    def record(self) -> CopyEvent:
        """Mark the end of the copies so far. Steps launched later do not overwrite what these read."""
        ...


_BlockState = tuple[str, int, int]
"""(state, owner, holders), as in `BlockRun`."""
_FREE: Final[_BlockState] = ("free", -1, 0)


def block_map(
    pool: BlockPool, computed_by: Sequence[str | None], uses: PrefixUses, running: Iterable[Request]
) -> BlockMap:
    """Return the state of every block and its holders. `computed_by`: the request that computed each block.
    `running`: all requests that have a block table.
    """
    requests = list(running)
    owners: dict[str, int] = {}
    live = _live(requests, owners)

    def describe(block: int) -> _BlockState:
        if (found := live.get(block)) is not None:
            return found
        if not pool.is_cached(block):
            return _FREE
        name = computed_by[block]
        return "cached", -1 if name is None else owners.setdefault(name, len(owners)), 0

    runs = [
        BlockRun(count=sum(1 for _ in same), state=state, owner=owner, holders=holders)
        for (state, owner, holders), same in groupby(map(describe, range(pool.num_blocks)))
    ]
    return BlockMap(
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        runs=runs,
        owners=list(owners),
        holders=[_holder(request, live) for request in requests],
        prefixes=uses.top(pool.has_prefix),
        evictions=pool.evictions,
    )


def _holder(request: Request, live: dict[int, _BlockState]) -> BlockHolder:
    shared = sum(live[block][2] > 1 for block in request.block_table)
    return BlockHolder(request_id=request.request_id, blocks=len(request.block_table), shared=shared)


def _live(running: Iterable[Request], owners: dict[str, int]) -> dict[int, _BlockState]:
    found: dict[int, _BlockState] = {}
    for request in running:
        owner = owners.setdefault(request.request_id, len(owners))
        for block in request.block_table:
            _, first, holders = found.get(block, ("live", owner, 0))
            found[block] = "live", first, holders + 1
    return found
