"""Block pool: KV memory as fixed-size blocks with reference counts, and the host tier of the prefix cache:
blocks that the memory of a GPU evicted, in pinned main memory.

A block of the pool is always in exactly one of three states:

    free     no content worth keeping
    cached   in no block table, but in the prefix cache: allocated last, least recently used first
    used     in the block tables of `refs[block]` requests

A snapshot of all blocks and their holders is made on request.

    the device evicts a block -> `HostTier.note_evicted` queues its copy, before anything overwrites it
    a request needs it again  -> `ReadAhead` holds it, copies it into a free block and releases it

A block that was copied back to the device is the first to be evicted from the host, so that both together
hold as many as they can; while it is there, the device can evict it again without a copy. Chain hashes have
the namespace in them, so a block is found by its own key alone. On a CPU device and host are the same memory:
there is no host tier.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        assert free | cached | used == set(range(self.num_blocks))
        assert not any(block in self._cache for block in free), "a free block is still named"
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


SLAB_BYTES: Final = 64 << 20
"""Bytes that are pinned at once, as blocks come: pinning takes long, and torch rounds sizes up to a power of
two.
"""
STEP_BYTES: Final = 1 << 30
"""Most bytes copied before one step, which waits for them on the device: 40 ms of a PCIe 4 bus. Blocks beyond
are not kept.
"""


@dataclass(slots=True, eq=False)
class HostBlock:
    """Block in host memory."""

    kind: BlockKind
    block_hash: bytes
    data: memoryview
    holders: int = 0
    """Copies to or from it that are under way: it is not evicted meanwhile."""
    is_dropped: bool = False
    """True once nobody is to find it; its memory is free when the last copy is done."""


class HostTier:
    """Blocks in host memory by kind and chain hash, on the engine's thread."""

    def __init__(self, memory: BlockMemory, num_blocks: Mapping[BlockKind, int]) -> None:
        """`num_blocks`: most blocks of each kind."""
        self.saved_bytes = self.loaded_bytes = 0
        """Bytes copied to the host, and back to the device."""
        self.num_passed = 0
        """Blocks that the device evicted and this tier did not keep."""
        self._memory, self._left = memory, dict(num_blocks)
        self._blocks: dict[BlockKind, OrderedDict[bytes, HostBlock]] = {
            kind: OrderedDict() for kind in num_blocks
        }
        self._free: dict[BlockKind, list[memoryview]] = {kind: [] for kind in num_blocks}
        self._queued: list[HostBlock] = []
        self._queued_bytes = 0
        self._copies: deque[tuple[CopyEvent, list[HostBlock]]] = deque()

    def evicts(self, kind: BlockKind) -> Callable[[int, bytes], None]:
        """Return the callback that a pool of this kind calls with each evicted block and its hash."""
        return lambda index, block_hash: self.note_evicted(kind, index, block_hash)

    def note_evicted(self, kind: BlockKind, index: int, block_hash: bytes) -> None:
        """Queue the copy of a block that the device evicts now. `flush` must follow before the next step."""
        blocks, size = self._blocks[kind], self._memory.sizes[kind]
        if block_hash in blocks:
            blocks.move_to_end(block_hash)
            return
        data = None
        if self._queued_bytes + size <= max(size, STEP_BYTES):
            data = self._take_buffer(kind)
        if data is None:
            self.num_passed += 1
            return
        block = blocks[block_hash] = HostBlock(kind, block_hash, data, holders=1)
        self._memory.save(kind, index, data)
        self._queued.append(block)
        self._queued_bytes += size
        self.saved_bytes += size

    def flush(self) -> None:
        """Make the device's next work wait for the queued copies; release finished ones."""
        if self._queued:
            self._copies.append((self._memory.record(), self._queued))
            self._queued, self._queued_bytes = [], 0
        self.finish_copies()

    def finish_copies(self, *, wait: bool = False) -> None:
        """Release the blocks whose copies are done, or `wait` for all."""
        while self._copies and (wait or self._copies[0][0].is_done):
            event, blocks = self._copies.popleft()
            event.wait()
            for block in blocks:
                self._unhold(block)

    def has(self, kind: BlockKind, block_hash: bytes) -> bool:
        return block_hash in self._blocks[kind]

    def hold(self, kind: BlockKind, block_hash: bytes) -> HostBlock | None:
        """Return a block to copy from, which stays until it is released; None if it is gone."""
        block = self._blocks[kind].get(block_hash)
        if block is not None:
            if block.holders:  # its own copy may still be under way, which is rare
                self.flush()
                self.finish_copies(wait=True)
            block.holders += 1
        return block

    def release(self, block: HostBlock, *, was_loaded: bool) -> None:
        """Release a held block. `was_loaded`: the device has it now."""
        if was_loaded:
            self.loaded_bytes += len(block.data)
            if not block.is_dropped:
                self._blocks[block.kind].move_to_end(block.block_hash, last=False)
        self._unhold(block)

    def drop(self, kind: BlockKind, block_hash: bytes) -> None:
        """Forget a block, because its content may be wrong."""
        block = self._blocks[kind].pop(block_hash, None)
        if block is not None:
            block.is_dropped = True
            block.holders += 1
            self._unhold(block)

    def _unhold(self, block: HostBlock) -> None:
        block.holders -= 1
        if block.is_dropped and not block.holders:
            self._free[block.kind].append(block.data)

    def stats(self) -> dict[str, int]:
        """Return the fields of `EngineStats` about the host tier."""
        return {
            "host_saved_bytes": self.saved_bytes,
            "host_loaded_bytes": self.loaded_bytes,
            "host_skipped": self.num_passed,
        }

    def _take_buffer(self, kind: BlockKind) -> memoryview | None:
        """Return memory of one block: new, or that of the block used least recently; None if all are held."""
        if not self._free[kind] and self._left[kind]:
            self._pin(kind)
        if self._free[kind]:
            return self._free[kind].pop()
        blocks = self._blocks[kind]
        oldest = next((key for key, block in blocks.items() if not block.holders), None)
        return None if oldest is None else blocks.pop(oldest).data

    def _pin(self, kind: BlockKind) -> None:
        """Pin memory of some more blocks. Where the system refuses, the tier stays as large as it is."""
        size = self._memory.sizes[kind]
        count = min(self._left[kind], max(1, SLAB_BYTES // size))
        try:
            slab = self._memory.make_buffer(count * size)
        except (MemoryError, RuntimeError):  # the latter is torch's
            self._left[kind] = 0
            return
        self._left[kind] -= count
        self._free[kind] += [slab[at * size : (at + 1) * size] for at in range(count)]
