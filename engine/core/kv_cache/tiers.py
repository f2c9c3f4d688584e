"""Tiers of the prefix cache: blocks in the engine's memory, behind them those that a GPU evicted to the host,
and files on disk.

`WriteBehind` gives cached blocks to a `BlockStore`, a `HostTier` gets those that are evicted, and `ReadAhead`
takes blocks from both before their request is queued. So admission knows one prefix cache only.
"""

import time
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

from ...kv_store.block_file import BlockAddress, BlockKind
from ...kv_store.store import BlockStore
from ..request import Request
from .block_pool import BlockMemory, BlockPool
from .host_tier import HostTier
from .read_ahead import ReadAhead
from .write_behind import WriteBehind

if TYPE_CHECKING:
    from .manager import KVCacheManager


class CacheMemory:
    """Blocks and slots of the prefix cache in the engine's memory, by kind."""

    def __init__(self, memory: BlockMemory, kv_cache: "KVCacheManager") -> None:
        self.memory = memory
        self.kv_cache = kv_cache

    def pool(self, kind: BlockKind) -> BlockPool:
        windows = self.kv_cache.windows
        return self.kv_cache.pool if kind == "kv" or windows is None else windows.pool

    def index(self, kind: BlockKind, block_hash: bytes) -> int | None:
        """Return the block or the slot in memory."""
        if kind == "state":
            states = self.kv_cache.states
            return None if states is None else states.pool.find((block_hash,))[1]
        return next(iter(self.pool(kind).find((block_hash,))), None)

    def allocate(self, kind: BlockKind) -> int | None:
        """Allocate a block or a slot; None where memory has no room."""
        if kind == "state":
            states = self.kv_cache.states
            return None if states is None else states.pool.allocate()
        return self.pool(kind).allocate(1)[0] if self.pool(kind).num_available else None

    def keep(self, kind: BlockKind, index: int, block_hash: bytes) -> None:
        """Cache a block that was allocated and filled."""
        if kind == "state":
            assert self.kv_cache.states is not None
            self.kv_cache.states.pool.keep(index, block_hash, is_end=True)
        else:
            self.pool(kind).cache_block(index, block_hash)
            self.pool(kind).free([index])

    def release(self, kind: BlockKind, index: int) -> None:
        """Free a block that was allocated, and forget its content."""
        if kind == "state":
            assert self.kv_cache.states is not None
            self.kv_cache.states.pool.free(index)
        else:
            self.pool(kind).free([index])

    def refresh(self, request: Request) -> None:
        """Make the request's blocks the last to be evicted, and of these the first ones."""
        blocks = self.kv_cache.pool.find(request.block_hashes)
        self.kv_cache.pool.touch(blocks)
        self.kv_cache.pool.free(blocks)


class DiskBlocks:
    """Blocks of a `BlockStore`, by request and chain hash."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self._owners: dict[str, str] = {}

    def address(self, request: Request, kind: BlockKind, block_hash: bytes) -> BlockAddress:
        owner = self._owners.get(request.tenant)
        if owner is None:
            owner = self._owners[request.tenant] = self.store.folder.owner(request.tenant)
        return self.store.address(owner, kind, block_hash)

    def has(self, request: Request, kind: BlockKind, block_hash: bytes) -> bool:
        return self.store.has(self.address(request, kind, block_hash))


class KVTiers:
    """Moves blocks between the pools of a `KVCacheManager` and the tiers, on the engine's thread."""

    def __init__(
        self,
        store: BlockStore | None,
        memory: BlockMemory,
        kv_cache: "KVCacheManager",
        clock: Callable[[], float] = time.monotonic,
        *,
        host: HostTier | None = None,
    ) -> None:
        """`store`: None where nothing is kept on disk. `host`: None where device and host are one memory."""
        self.host = host
        blocks = CacheMemory(memory, kv_cache)
        self.disk = None if store is None else DiskBlocks(store)
        self.writes = None if self.disk is None else WriteBehind(blocks, self.disk, clock)
        self.reads = ReadAhead(blocks, self.disk, host, clock)
        if host is not None:
            kv_cache.pool.set_eviction_callback(host.evicts("kv"))
            if kv_cache.windows is not None:
                kv_cache.windows.pool.set_eviction_callback(host.evicts("window"))
            if kv_cache.states is not None:
                kv_cache.states.pool.on_evict = host.evicts("state")
        self._kinds = tuple(memory.sizes)
        self._largest = max(memory.sizes.values())
        self._clock = clock

    def note_cached(self, request: Request, kind: BlockKind, block_hash: bytes) -> None:
        """Have a block that was just cached written, unless it is on disk."""
        if self.writes is not None:
            self.writes.note_cached(request, kind, block_hash)

    def note_state(self, request: Request, block_hash: bytes, *, is_turn_end: bool) -> None:
        """Have a state that was just kept written, if it is the end of a turn or small."""
        if self.writes is not None:
            self.writes.note_state(request, block_hash, is_turn_end=is_turn_end)

    def note_ended(self, request: Request) -> None:
        """Note that a request used its blocks: their first ones are kept longest, as all others need them."""
        request.reads_later = True  # where it was preempted
        if self.disk is None or self.writes is None:
            return
        hashes = reversed(request.block_hashes)
        self.disk.store.touch(
            [self.disk.address(request, kind, each) for each in hashes for kind in self._kinds]
        )
        if (state := request.answer_state) is not None:
            self.writes.note_cached(request, "state", state, is_turn_end=True)

    def note_suspect(self, request: Request) -> None:
        """Remove a request's blocks from all tiers, because their content may be wrong; end reads of them."""
        hashes = frozenset(request.block_hashes)
        self.reads.drop(hashes)
        if self.host is not None:
            for kind, block_hash in product(self._kinds, hashes):
                self.host.drop(kind, block_hash)
        if self.disk is None or self.writes is None:
            return
        self.writes.finish_copies(wait=True)  # their writes are queued before they are removed
        for kind, block_hash in product(self._kinds, hashes):
            self.writes.drop(kind, block_hash)
        self.disk.store.remove([self.disk.address(request, *each) for each in product(self._kinds, hashes)])

    @property
    def has_work(self) -> bool:
        """True if blocks wait to be written, or are being read."""
        return self.reads.is_reading or (self.writes is not None and self.writes.has_work)

    def before_step(self) -> None:
        """Have the step that is launched next not overwrite a block before its copy is done."""
        if self.host is not None:
            self.host.flush()

    def pump(self, *, sparingly: bool = False) -> bool:
        """Copy blocks for the writer, see `WriteBehind.pump`."""
        return self.writes is not None and self.writes.pump(sparingly=sparingly)

    def stats(self) -> dict[str, int]:
        """Return the fields of `EngineStats` about the tiers."""
        host = {} if self.host is None else self.host.stats()
        if self.disk is None or self.writes is None:
            return host
        files = self.disk.store.counters
        return host | {
            "disk_written_bytes": files.written_bytes,
            "disk_read_bytes": files.read_bytes,
            "disk_damaged": files.damaged,
            "disk_late": self.reads.num_late,
            "disk_skipped": self.writes.num_passed + files.refused,
        }

    def close(self, seconds: float) -> None:
        """Write what waits, for `seconds` at most."""
        end = self._clock() + seconds
        while self.pump() and self._clock() < end:
            self.wait_for_writer(end - self._clock())
        self.reads.finish_copies()
        if self.disk is not None and self.writes is not None:
            self.writes.finish_copies()
            self.disk.store.close(max(0.0, end - self._clock()))

    def wait_for_writer(self, seconds: float) -> None:
        """Wait until the writer takes another block."""
        if self.disk is not None:
            store = self.disk.store
            store.wait(seconds, lambda: store.accepts(self._largest))
