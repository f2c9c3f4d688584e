"""Tiers of the prefix cache: blocks in the engine's memory, behind them those that a GPU evicted to the host,
and files on disk.

`WriteBehind` gives cached blocks to a `BlockStore`, a `HostTier` gets those that are evicted, and `ReadAhead`
takes blocks from both before their request is queued. So admission knows one prefix cache only.

A block that was cached waits, `pump` copies it, and the store's thread writes the file. A block that is
evicted before it was copied is not written.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

from ...kv_store.block_file import BlockAddress, BlockKind
from ...kv_store.store import BlockStore
from ...kv_store.store_threads import BlockWrite
from ..request import Request
from .block_pool import BlockMemory, BlockPool, CopyEvent
from .host_tier import HostTier
from .read_ahead import ReadAhead

if TYPE_CHECKING:
    from .manager import KVCacheManager


STEP_BYTES: Final = 64 << 20
"""Most bytes that one call copies, next to a step."""
BUSY_SHARE: Final = 0.005
"""Share of one core's time that copying and writing takes beside steps on a CPU, which needs all cores for
these: a step waits for its slowest one. The system takes about as much again when it brings files to the
disk. The rest is written when nothing runs.
"""
BUSY_BURST: Final = 0.005
"""Seconds of this at once."""
SMALL_STATE_BLOCKS: Final = 16
"""KV blocks whose bytes a recurrent state may take to be written at every place where it is kept."""


@dataclass(frozen=True, slots=True)
class _PendingBlock:
    kind: BlockKind
    block_hash: bytes
    address: BlockAddress
    has_quota: bool
    is_turn_end: bool


@dataclass(frozen=True, slots=True)
class _Copies:
    """Blocks whose copies are queued on the device, and the event after the last one."""

    event: CopyEvent
    saved: list[tuple[_PendingBlock, memoryview]]


class WriteBehind:
    """Blocks that wait to be written, on the engine's thread."""

    def __init__(self, blocks: "CacheMemory", disk: "DiskBlocks", clock: Callable[[], float]) -> None:
        self.num_passed = 0
        """Blocks that were evicted before they could be written."""
        self._blocks, self._disk, self._clock = blocks, disk, clock
        self._sizes = blocks.memory.sizes
        self._pending: OrderedDict[tuple[BlockKind, bytes], _PendingBlock] = OrderedDict()
        self._copies: deque[_Copies] = deque()
        self._copying = 0
        """Bytes of these."""
        self._most_pending = blocks.kv_cache.pool.num_blocks
        self._credit, self._credited = BUSY_BURST, clock()
        self._copy_seconds_per_byte = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._copies)

    def note_cached(
        self, request: Request, kind: BlockKind, block_hash: bytes, *, is_turn_end: bool = False
    ) -> None:
        """Schedule the write of a block that was just cached, unless it is on disk."""
        address = self._disk.address(request, kind, block_hash)
        if not self._disk.store.has(address):
            block = _PendingBlock(kind, block_hash, address, bool(request.tenant), is_turn_end)
            self._pending[kind, block_hash] = block
            if len(self._pending) > self._most_pending:
                self._pending.popitem(last=False)
                self.num_passed += 1

    def note_state(self, request: Request, block_hash: bytes, *, is_turn_end: bool) -> None:
        """Schedule the write of a state that was just kept, if it is the end of a turn or small."""
        if is_turn_end or self._sizes["state"] <= SMALL_STATE_BLOCKS * self._sizes["kv"]:
            self.note_cached(request, "state", block_hash, is_turn_end=is_turn_end)

    def drop(self, kind: BlockKind, block_hash: bytes) -> None:
        self._pending.pop((kind, block_hash), None)

    def pump(self, *, sparingly: bool = False) -> bool:
        """Copy blocks for the writer as far as it keeps up. Returns True if blocks are left that can be.

        `sparingly`: beside steps on a CPU.
        """
        self.finish_copies()
        store, saved = self._disk.store, list[tuple[_PendingBlock, memoryview]]()
        left, began = STEP_BYTES, time.thread_time()
        if sparingly:
            self._earn()
        while self._pending:
            key, block = next(iter(self._pending.items()))
            size = self._sizes[block.kind]
            enough = self._credit > 0 if sparingly else left >= min(size, STEP_BYTES)
            if not enough or not store.accepts(size, self._copying):
                break
            del self._pending[key]
            index = self._blocks.index(block.kind, block.block_hash)
            if index is None:
                self.num_passed += 1
                continue
            try:
                buffer = store.take_buffer(size)
            except (MemoryError, RuntimeError):  # the latter is torch's
                self.num_passed += 1
                break
            self._copying += size
            self._blocks.memory.save(block.kind, index, buffer)
            saved.append((block, buffer))
            left -= size
            if sparingly:
                self._credit -= size * (self._copy_seconds_per_byte + store.seconds_per_byte)
        if saved:
            spent = (time.thread_time() - began) / (STEP_BYTES - left)
            self._copy_seconds_per_byte += 0.3 * (spent - self._copy_seconds_per_byte)
            self._copies.append(_Copies(self._blocks.memory.record(), saved))
            self.finish_copies()
        return bool(self._copies or (self._pending and not store.is_paused))

    def _earn(self) -> None:
        """Add to the budget of copies what the time since the last call allows."""
        now = self._clock()
        self._credit = min(BUSY_BURST, self._credit + (now - self._credited) * BUSY_SHARE)
        self._credited = now

    def finish_copies(self, *, wait: bool = False) -> None:
        """Pass on the finished copies; with `wait`, wait for all."""
        while self._copies and (wait or self._copies[0].event.is_done):
            copies = self._copies.popleft()
            copies.event.wait()
            for block, buffer in copies.saved:
                write = BlockWrite(block.address, buffer, block.has_quota, block.is_turn_end)
                self._disk.store.write(write)
                self._copying -= len(buffer)


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
        """Mark the request's blocks as just used. A later eviction takes the end of the prefix first."""
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
        if kv_cache.windows is not None:
            kv_cache.windows.end_loads = partial(self.reads.finish_copies, wait=True)
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
        """Schedule the write of a block that was just cached, unless it is on disk."""
        if self.writes is not None:
            self.writes.note_cached(request, kind, block_hash)

    def note_state(self, request: Request, block_hash: bytes, *, is_turn_end: bool) -> None:
        """Schedule the write of a state that was just kept, if it is the end of a turn or small."""
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
        """Make the next launched step wait for queued copies, so that it overwrites no block too early."""
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
        """Write the waiting blocks, for `seconds` at most."""
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
