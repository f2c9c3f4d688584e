"""Tiers of the prefix cache: blocks in the engine's memory, and behind them files on disk.

    a block is cached  -> it waits in `_pending` -> `pump` copies it -> the store's thread writes the file
    a request is added -> `begin` finds its next blocks on disk -> the store's thread reads them
                       -> `poll` copies each into a free block and caches it -> the request is queued

So admission knows one prefix cache only. A block that is evicted before it was written is not written.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Final

from ...kv_store.block_file import BlockAddress, BlockKind
from ...kv_store.store import BlockStore, BlockWrite, ReadJob
from ..request import Request
from .block_pool import BlockMemory, BlockPool, CopyEvent
from .prefix_cache import extend_hashes

if TYPE_CHECKING:
    from .manager import KVCacheManager

STEP_BYTES: Final = 64 << 20
"""Most bytes that one call copies each way, next to a step."""
BUSY_RATE: Final = 12e6
"""Bytes a second that are copied and written beside steps on a CPU, which needs its cores and its memory's
bandwidth for these. The rest is written when nothing runs.
"""
BUSY_BURST: Final = 8e6
"""Bytes of these at once."""
LEAST_SECONDS: Final = 1.0
"""Time that a request waits for the disk, however few tokens it saves."""
WAIT_SHARE: Final = 0.5
"""Share of the time that its tokens took to compute, for which it waits otherwise."""
FIRST_RATE: Final = 100.0
"""Prompt tokens computed a second, until some were measured."""
QUIET_SECONDS: Final = 5.0
"""Time without a block from disk after which a request waits no longer."""
SMALL_STATE_BLOCKS: Final = 16
"""KV blocks whose bytes a recurrent state may take to be written at every place where it is kept."""


@dataclass(slots=True)
class TierCounters:
    """Counters since the engine started; those of the files are in `BlockStore.counters`."""

    late: int = 0
    """Requests that no longer waited for the disk."""
    passed: int = 0
    """Blocks that were evicted before they could be written."""


@dataclass(frozen=True, slots=True)
class _PendingBlock:
    kind: BlockKind
    block_hash: bytes
    address: BlockAddress
    has_quota: bool
    is_turn_end: bool


@dataclass(slots=True)
class _Reading:
    """Request that waits for blocks from disk."""

    request: Request
    job: ReadJob
    items: list[tuple[BlockKind, bytes]]
    deadline: float
    heard: float
    """Time of the last block."""


@dataclass(slots=True)
class _Copies:
    """Blocks whose copies are queued on the device, and the event after the last one."""

    event: CopyEvent
    saved: list[tuple[_PendingBlock, memoryview]] = field(default_factory=list)
    loaded: list[memoryview] = field(default_factory=list)


class KVTiers:
    """Moves blocks between the pools of a `KVCacheManager` and a `BlockStore`, on the engine's thread."""

    def __init__(
        self,
        store: BlockStore,
        memory: BlockMemory,
        kv_cache: "KVCacheManager",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.counters = TierCounters()
        self._memory = memory
        self._kv_cache = kv_cache
        self._clock = clock
        self._pending: OrderedDict[tuple[BlockKind, bytes], _PendingBlock] = OrderedDict()
        self._reading: dict[str, _Reading] = {}
        self._copies: deque[_Copies] = deque()
        self._owners: dict[str, str] = {}
        self._most_pending = kv_cache.pool.num_blocks
        self._block_kv = memory.sizes["kv"]
        self._rate = FIRST_RATE
        self._credit, self._credited = BUSY_BURST, clock()

    # ------------------------------------------------------------------ memory to disk

    def note_cached(
        self, request: Request, kind: BlockKind, block_hash: bytes, *, is_turn_end: bool = False
    ) -> None:
        """Have a block that was just cached written, unless it is on disk."""
        address = self._address(request, kind, block_hash)
        if not self.store.has(address):
            block = _PendingBlock(kind, block_hash, address, bool(request.tenant), is_turn_end)
            self._pending[kind, block_hash] = block
            if len(self._pending) > self._most_pending:
                self._pending.popitem(last=False)
                self.counters.passed += 1

    def note_state(self, request: Request, block_hash: bytes, *, is_turn_end: bool) -> None:
        """Have a state that was just kept written, if it is the end of a turn or small."""
        if is_turn_end or self._memory.sizes["state"] <= SMALL_STATE_BLOCKS * self._block_kv:
            self.note_cached(request, "state", block_hash, is_turn_end=is_turn_end)

    def note_ended(self, request: Request) -> None:
        """Note that a request used its blocks: their first ones are kept longest, as all others need them."""
        kinds, hashes = self._memory.sizes, reversed(request.block_hashes)
        self.store.touch([self._address(request, kind, each) for each in hashes for kind in kinds])
        if (state := request.answer_state) is not None:
            self.note_cached(request, "state", state, is_turn_end=True)

    def note_suspect(self, request: Request) -> None:
        """Remove a request's blocks from disk, because their content may be wrong; end reads of them."""
        self._finish_copies()  # their writes are queued before they are removed
        hashes = frozenset(request.block_hashes)
        for kind, block_hash in product(self._memory.sizes, hashes):
            self._pending.pop((kind, block_hash), None)
        for reading in self._reading.values():
            if not hashes.isdisjoint(block_hash for _, block_hash in reading.items):
                self.store.cancel(reading.job)  # `poll` returns its request
        self.store.remove([self._address(request, *each) for each in product(self._memory.sizes, hashes)])

    def pump(self, *, sparingly: bool = False) -> bool:
        """Copy blocks for the writer as far as it keeps up. Returns True if blocks are left that can be.

        `sparingly`: beside steps on a CPU.
        """
        self._finish_copies()
        saved: list[tuple[_PendingBlock, memoryview]] = []
        left = allowed = self._allowance() if sparingly else STEP_BYTES
        while self._pending:
            key, block = next(iter(self._pending.items()))
            size = self._memory.sizes[block.kind]
            enough = left > 0 if sparingly else left >= min(size, STEP_BYTES)
            if not enough or not self.store.accepts(size):
                break
            del self._pending[key]
            index = self._index(block.kind, block.block_hash)
            if index is None:
                self.counters.passed += 1
                continue
            buffer = self.store.take_buffer(size)
            self._memory.save(block.kind, index, buffer)
            saved.append((block, buffer))
            left -= size
        if sparingly:
            self._credit -= allowed - left
        if saved:
            self._copies.append(_Copies(self._memory.record(), saved=saved))
        return bool(self._copies or (self._pending and not self.store.is_paused))

    def _allowance(self) -> int:
        """Return the bytes that may be copied beside this step; below 0: none."""
        now = self._clock()
        self._credit = min(BUSY_BURST, self._credit + (now - self._credited) * BUSY_RATE)
        self._credited = now
        return int(self._credit)

    def _finish_copies(self) -> None:
        """Hand on what was copied before the last step. On a CPU a copy is done when its call returns."""
        while self._copies:
            copies = self._copies.popleft()
            copies.event.wait()
            for block, buffer in copies.saved:
                self.store.write(BlockWrite(block.address, buffer, block.has_quota, block.is_turn_end))
            for buffer in copies.loaded:
                self.store.give_back(buffer)

    def stats(self) -> dict[str, int]:
        """Return the fields of `EngineStats` about the disk."""
        files = self.store.counters
        return {
            "disk_written_bytes": files.written_bytes,
            "disk_read_bytes": files.read_bytes,
            "disk_damaged": files.damaged,
            "disk_late": self.counters.late,
            "disk_skipped": self.counters.passed + files.refused,
        }

    def close(self, seconds: float) -> None:
        """Write what waits, for `seconds` at most."""
        end = self._clock() + seconds
        while self.pump() and self._clock() < end:
            self.wait_for_writer(end - self._clock())
        self._finish_copies()
        self.store.close(max(0.0, end - self._clock()))

    def wait_for_writer(self, seconds: float) -> None:
        """Wait until the writer takes another block."""
        largest = max(self._memory.sizes.values())
        self.store.wait(seconds, lambda: self.store.accepts(largest))

    # ------------------------------------------------------------------ disk to memory

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def begin(self, request: Request, deadline: float = math.inf) -> bool:
        """Read ahead what the disk has of a request's prompt. True: it waits until `poll` returns it."""
        if not self.store.num_blocks or self.store.is_stalled:
            return False
        items = self._missing(request)
        if not items:
            return False
        wanted = [(self._address(request, *item), self._memory.sizes[item[0]]) for item in items]
        self._refresh(request)
        now = self._clock()
        saved = sum(kind == "kv" for kind, _ in items) * self._kv_cache.pool.block_size
        limit = LEAST_SECONDS + WAIT_SHARE * saved / self._rate
        job = self.store.read(wanted)
        self._reading[request.request_id] = _Reading(request, job, items, min(deadline, now + limit), now)
        return True

    def _missing(self, request: Request) -> list[tuple[BlockKind, bytes]]:
        """Return what to read, in order, for the longest prefix that memory and disk have together; nothing
        where memory has as much.
        """
        pool, kv_cache = self._kv_cache.pool, self._kv_cache
        usable = kv_cache.lookup_blocks(request)
        extend_hashes(request, pool.block_size, usable)
        hashes = request.block_hashes[:usable]
        ahead = list[tuple[BlockKind, bytes]]()
        end = 0
        for block_hash in hashes:
            if not pool.has_prefix(block_hash):
                if not self._has(request, "kv", block_hash):
                    break
                ahead.append(("kv", block_hash))
            end += 1
        if not ahead and kv_cache.states is None and kv_cache.windows is None:
            return []
        known = self._known_end(request, hashes, end)
        found, _ = kv_cache.find_prefix(request)
        if known <= len(found):
            return []
        return self._items(hashes[:known])

    def _known_end(self, request: Request, hashes: list[bytes], end: int) -> int:
        """Return the longest prefix, of `end` blocks at most, whose state or window is known too."""
        kv_cache = self._kv_cache
        if kv_cache.windows is not None:
            pool = kv_cache.windows.pool
            has = [pool.has_prefix(each) or self._has(request, "window", each) for each in hashes[:end]]
            return kv_cache.windows.usable(has)
        if kv_cache.states is None:
            return end
        states = kv_cache.states.pool
        return next(
            (
                blocks
                for blocks in range(end, 0, -1)
                if states.has(hashes[blocks - 1]) or self._has(request, "state", hashes[blocks - 1])
            ),
            0,
        )

    def _items(self, hashes: list[bytes]) -> list[tuple[BlockKind, bytes]]:
        kv_cache = self._kv_cache
        items: list[tuple[BlockKind, bytes]] = [
            ("kv", block_hash) for block_hash in hashes if not kv_cache.pool.has_prefix(block_hash)
        ]
        if kv_cache.windows is not None:
            first = kv_cache.windows.first_needed(len(hashes) * kv_cache.pool.block_size)
            pool = kv_cache.windows.pool
            items += [("window", each) for each in hashes[first:] if not pool.has_prefix(each)]
        if kv_cache.states is not None and not kv_cache.states.pool.has(hashes[-1]):
            items.append(("state", hashes[-1]))
        return items

    def poll(self) -> list[Request]:
        """Take in the blocks that have arrived; return the requests that need not wait any more."""
        if not self._reading:
            return []
        self._finish_copies()
        left, now, done = STEP_BYTES, self._clock(), list[Request]()
        loaded: list[memoryview] = []
        for reading in list(self._reading.values()):
            has_room = True
            reading.heard = now if reading.job.arrived else reading.heard
            while left > 0 and has_room and reading.job.arrived:
                position, outcome, data = reading.job.arrived.popleft()
                if data is None:
                    reading.request.disk_end = "damaged" if outcome == "damaged" else "evicted"
                    continue
                has_room = self._take_in(reading.request, *reading.items[position], data)
                loaded.append(data)
                left -= len(data)
            is_late = now > min(reading.deadline, reading.heard + QUIET_SECONDS)
            is_ended = reading.job.is_ended and not reading.job.arrived
            if (is_ended or is_late or not has_room) and self._end(reading, is_late=is_late and not is_ended):
                done.append(reading.request)
        if loaded:
            self._copies.append(_Copies(self._memory.record(), loaded=loaded))
        return done

    def _end(self, reading: _Reading, *, is_late: bool) -> bool:
        """End a read-ahead. False: what it lacked is read in another way."""
        request = reading.request
        del self._reading[request.request_id]
        self.store.cancel(reading.job)
        if is_late:
            self.counters.late += 1
            request.disk_end = "late"
        elif request.disk_end is not None and self.begin(request, reading.deadline):
            return False
        self._refresh(request)
        return True

    def _refresh(self, request: Request) -> None:
        """Make the request's blocks in memory the last to be evicted, and of these the first ones."""
        blocks = self._kv_cache.pool.find(request.block_hashes)
        self._kv_cache.pool.touch(blocks)
        self._kv_cache.pool.free(blocks)

    def _take_in(self, request: Request, kind: BlockKind, block_hash: bytes, data: memoryview) -> bool:
        """Cache a block in memory; False if there is no room."""
        if self._index(kind, block_hash) is not None:
            return True
        if kind == "state":
            states = self._kv_cache.states
            slot = None if states is None else states.pool.allocate()
            if states is None or slot is None:
                return False
            self._memory.load(kind, slot, data)
            states.pool.keep(slot, block_hash, is_end=True)
            return True
        pool = self._pool(kind)
        if not pool.num_available:
            return False
        (block,) = pool.allocate(1)
        self._memory.load(kind, block, data)
        pool.cache_block(block, block_hash)
        pool.free([block])
        request.num_disk_blocks += kind == "kv"
        return True

    def forget(self, request: Request) -> None:
        """Stop reading for a request that is gone."""
        reading = self._reading.pop(request.request_id, None)
        if reading is not None:
            self.store.cancel(reading.job)

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Note how long a step with prompts took: waiting for the disk must not take longer."""
        if seconds > 0:
            self._rate += 0.3 * (tokens / seconds - self._rate)

    def wait(self, seconds: float) -> None:
        """Wait until a block has arrived from disk."""
        jobs = [reading.job for reading in self._reading.values()]
        self.store.wait(seconds, lambda: any(job.arrived or job.is_ended for job in jobs))

    # ------------------------------------------------------------------ where blocks are

    def _address(self, request: Request, kind: BlockKind, block_hash: bytes) -> BlockAddress:
        owner = self._owners.get(request.tenant)
        if owner is None:
            owner = self._owners[request.tenant] = self.store.folder.owner(request.tenant)
        return self.store.address(owner, kind, block_hash)

    def _has(self, request: Request, kind: BlockKind, block_hash: bytes) -> bool:
        return self.store.has(self._address(request, kind, block_hash))

    def _pool(self, kind: BlockKind) -> BlockPool:
        windows = self._kv_cache.windows
        return self._kv_cache.pool if kind == "kv" or windows is None else windows.pool

    def _index(self, kind: BlockKind, block_hash: bytes) -> int | None:
        """Return the block or the slot in memory."""
        if kind == "state":
            states = self._kv_cache.states
            return None if states is None else states.pool.find((block_hash,))[1]
        return next(iter(self._pool(kind).find((block_hash,))), None)
