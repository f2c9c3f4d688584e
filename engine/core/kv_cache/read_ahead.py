"""Read-ahead: blocks that a request's prompt has in the host tier and on disk come into memory before it is
queued.

a request is added -> `begin` finds its next blocks in both -> the store's thread reads those on disk
                   -> `poll` copies each into a free block and caches it -> the request is queued
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from ...kv_store.block_file import BlockKind
from ...kv_store.store_threads import ReadJob
from ..request import Request
from .block_pool import CopyEvent
from .host_tier import HostBlock, HostTier
from .prefix_cache import extend_hashes

if TYPE_CHECKING:
    from .tiers import CacheMemory, DiskBlocks

STEP_BYTES: Final = 64 << 20
"""Most bytes that one call copies, next to a step."""
BLOCKS_AT_ONCE: Final = 8
"""Blocks from disk for which an engine that has nothing else to do looks again: what it does then takes the
interpreter from the thread that reads, for longer than that one needs for a block.
"""
LEAST_SECONDS: Final = 1.0
"""Time that a request waits for the disk, however few tokens it saves."""
WAIT_SHARE: Final = 0.5
"""Share of the time that its tokens took to compute, for which it waits otherwise."""
FIRST_RATE: Final = 100.0
"""Prompt tokens computed a second, until some were measured."""
QUIET_SECONDS: Final = 5.0
"""Time without a block from disk after which a request waits no longer."""


@dataclass(slots=True)
class _Reading:
    """Request that waits for blocks. Without items it waits until the files are listed."""

    request: Request
    job: ReadJob | None
    """Read of `items`; None: nothing is awaited from disk."""
    items: list[tuple[BlockKind, bytes]]
    """Blocks on disk."""
    held: deque[HostBlock]
    """Blocks of the host tier that are still to be copied."""
    deadline: float
    heard: float
    """Time of the last block."""
    num_loading: int = 0
    """Blocks that are being copied."""
    has_room: bool = True

    @property
    def num_to_come(self) -> int:
        """Number of KV blocks still to be loaded, for which memory must have room."""
        job = self.job
        begun = 0 if job is None else max(0, job.started - len(job.arrived))
        from_disk = sum(kind == "kv" for kind, _ in self.items[begun:])
        return from_disk + sum(block.kind == "kv" for block in self.held)

    @property
    def awaits_disk(self) -> bool:
        return self.job is not None and not (self.job.is_ended and not self.job.arrived)


@dataclass(slots=True)
class _Load:
    """Block that is being copied to the device."""

    reading: _Reading
    kind: BlockKind
    block: int
    block_hash: bytes
    data: memoryview
    held: HostBlock | None
    """Block of the host tier that it is copied from; None: from a buffer of the store."""
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class _Loads:
    event: CopyEvent
    loads: list[_Load] = field(default_factory=list)


class ReadAhead:
    """Requests that wait for blocks from the tiers, on the engine's thread."""

    def __init__(
        self,
        blocks: "CacheMemory",
        disk: "DiskBlocks | None",
        host: HostTier | None,
        clock: Callable[[], float],
    ) -> None:
        self.num_late = 0
        """Requests that no longer waited for the disk."""
        self._blocks, self._disk, self._host, self._clock = blocks, disk, host, clock
        self._sizes = blocks.memory.sizes
        self._reading: dict[str, _Reading] = {}
        self._copies: deque[_Loads] = deque()
        self._rate = FIRST_RATE

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def begin(self, request: Request, deadline: float = math.inf) -> bool:
        """Read what host and disk have of a request's prompt. True: it waits until `poll` returns it. Without
        room in memory it reads later, when it is admitted.
        """
        now, disk = self._clock(), self._disk
        request.reads_later = False
        is_listed = disk is None or disk.store.is_listed or disk.store.is_stalled
        items = self._missing(request) if is_listed else []
        if is_listed and not items:
            return False
        self._blocks.refresh(request)
        saved = sum(kind == "kv" for kind, _ in items) * self._blocks.kv_cache.pool.block_size
        limit = min(deadline, now + LEAST_SECONDS + WAIT_SHARE * saved / self._rate)
        held, job = deque[HostBlock](), None
        if self._host is not None:
            held.extend(filter(None, (self._host.hold(*item) for item in items)))
            here = {(block.kind, block.block_hash) for block in held}
            items = [item for item in items if item not in here]
        if disk is not None and (items or not is_listed):
            job = disk.store.read([(disk.address(request, *item), self._sizes[item[0]]) for item in items])
        self._reading[request.request_id] = _Reading(request, job, items, held, limit, now)
        return True

    def _is_behind(self, request: Request, kind: BlockKind, block_hash: bytes) -> bool:
        """Return True if the host tier or the disk has a block."""
        if self._host is not None and self._host.has(kind, block_hash):
            return True
        disk = self._disk
        return disk is not None and not disk.store.is_stalled and disk.has(request, kind, block_hash)

    def _missing(self, request: Request) -> list[tuple[BlockKind, bytes]]:
        """Return what to read, in order, to complete the longest prefix that all tiers have together. Empty
        if memory has as much already, or no room.
        """
        pool, kv_cache = self._blocks.kv_cache.pool, self._blocks.kv_cache
        usable = kv_cache.lookup_blocks(request)
        extend_hashes(request, pool.block_size, usable)
        hashes = request.block_hashes[:usable]
        room = pool.num_available - pool.num_idle(pool.find(hashes))
        room -= sum(reading.num_to_come for reading in self._reading.values())
        ahead = end = 0
        for block_hash in hashes:
            if not pool.has_prefix(block_hash):
                if not self._is_behind(request, "kv", block_hash):
                    break
                if ahead >= room:
                    request.reads_later = True
                    return []
                ahead += 1
            end += 1
        if not ahead and kv_cache.states is None and kv_cache.windows is None:
            return []
        known = kv_cache.usable_end(hashes[:end], partial(self._is_known, request))
        found, _ = kv_cache.find_prefix(request)
        return self._items(hashes[:known]) if known > len(found) else []

    def _is_known(self, request: Request, kind: BlockKind, block_hash: bytes) -> bool:
        """Return True if memory or a tier has the block of a window, or a state."""
        return self._blocks.kv_cache.has(kind, block_hash) or self._is_behind(request, kind, block_hash)

    def _items(self, hashes: list[bytes]) -> list[tuple[BlockKind, bytes]]:
        kv_cache = self._blocks.kv_cache
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
        self.finish_copies()
        left, now, done = STEP_BYTES, self._clock(), list[Request]()
        loads: list[_Load] = []
        for reading in self._reading.values():
            while left > 0 and reading.has_room and reading.held:
                block = reading.held.popleft()
                loads += self._load(reading, block.kind, block.block_hash, block.data, block)
                left -= len(block.data)
            if (job := reading.job) is None:
                continue
            reading.heard = now if job.arrived else reading.heard
            while left > 0 and reading.has_room and job.arrived:
                position, outcome, data = job.arrived.popleft()
                if data is None:
                    reading.request.disk_end = "damaged" if outcome == "damaged" else "evicted"
                    continue
                loads += self._load(reading, *reading.items[position], data, None)
                left -= len(data)
        if loads:
            self._copies.append(_Loads(self._blocks.memory.record(), loads))
            self.finish_copies()
        for reading in [each for each in self._reading.values() if not each.num_loading]:
            is_late = reading.awaits_disk and now > min(reading.deadline, reading.heard + QUIET_SECONDS)
            is_ended = not reading.awaits_disk and not reading.held
            over = is_ended or is_late or not reading.has_room
            if over and self._end(reading, is_late=is_late):
                done.append(reading.request)
        return done

    def _end(self, reading: _Reading, *, is_late: bool) -> bool:
        """End a read-ahead. False: what it lacked is read in another way."""
        request, has_listed = reading.request, reading.job is not None and not reading.items
        del self._reading[request.request_id]
        self._cancel(reading)
        if is_late:
            self.num_late += 1
            request.disk_end = "late"
        elif request.disk_end is not None or has_listed:
            if self.begin(request, reading.deadline):
                return False
        elif not reading.has_room:
            request.disk_end = "evicted"
        self._blocks.refresh(request)
        return True

    def _load(
        self,
        reading: _Reading,
        kind: BlockKind,
        block_hash: bytes,
        data: memoryview,
        held: HostBlock | None,
    ) -> Iterable[_Load]:
        """Begin to copy a block to the device, unless memory has it or has no room."""
        blocks = self._blocks
        block = None
        if blocks.index(kind, block_hash) is None:
            block = blocks.allocate(kind)
            reading.has_room = block is not None
        if block is None:
            self._give_back(data, held, was_loaded=False)
            return ()
        blocks.memory.load(kind, block, data)
        reading.num_loading += 1
        return (_Load(reading, kind, block, block_hash, data, held),)

    def _give_back(self, data: memoryview, held: HostBlock | None, *, was_loaded: bool) -> None:
        if held is not None and self._host is not None:
            self._host.release(held, was_loaded=was_loaded)
        elif self._disk is not None:
            self._disk.store.give_back(data)

    def _cancel(self, reading: _Reading) -> None:
        """Give back what was not copied."""
        if reading.job is not None and self._disk is not None:
            self._disk.store.cancel(reading.job)
        while reading.held:
            block = reading.held.popleft()
            self._give_back(block.data, block, was_loaded=False)

    def finish_copies(self, *, wait: bool = False) -> None:
        """Cache the blocks whose copies are done, or `wait` for all."""
        while self._copies and (wait or self._copies[0].event.is_done):
            copies = self._copies.popleft()
            copies.event.wait()
            for load in reversed(copies.loads):  # a prefix is evicted tail first
                self._finish(load)

    def _finish(self, load: _Load) -> None:
        load.reading.num_loading -= 1
        self._give_back(load.data, load.held, was_loaded=load.is_wanted)
        if load.is_wanted:
            self._blocks.keep(load.kind, load.block, load.block_hash)
            request = load.reading.request
            request.num_disk_blocks += load.kind == "kv" and load.held is None
            request.num_host_blocks += load.kind == "kv" and load.held is not None
        else:
            self._blocks.release(load.kind, load.block)

    def forget(self, request: Request) -> None:
        """Stop reading for a request that is gone."""
        reading = self._reading.pop(request.request_id, None)
        if reading is not None:
            self._cancel(reading)

    def drop(self, hashes: frozenset[bytes]) -> None:
        """End reads of these blocks; none that is on its way is cached."""
        for load in (load for copies in self._copies for load in copies.loads):
            load.is_wanted &= load.block_hash not in hashes
        for reading in self._reading.values():
            wanted = [*(each for _, each in reading.items), *(block.block_hash for block in reading.held)]
            if not hashes.isdisjoint(wanted):
                self._cancel(reading)  # `poll` returns its request

    def loading(self, kind: BlockKind) -> list[int]:
        """Return the blocks or slots that copies fill, which no block table has yet."""
        loads = (load for copies in self._copies for load in copies.loads)
        return [load.block for load in loads if load.kind == kind]

    def note_computed(self, tokens: int, seconds: float) -> None:
        """Note how long a step with prompts took: waiting for the disk must not take longer."""
        if seconds > 0:
            self._rate += 0.3 * (tokens / seconds - self._rate)

    def wait(self, seconds: float) -> None:
        """Wait until some blocks have arrived from disk, or one in memory."""
        if self._copies:
            self._copies[0].event.wait()
        elif self._disk is not None and not any(reading.held for reading in self._reading.values()):
            store = self._disk.store
            jobs = [reading.job for reading in self._reading.values() if reading.job is not None]
            store.wait(seconds, lambda: store.is_full or any(map(_is_worth_a_look, jobs)))


def _is_worth_a_look(job: ReadJob) -> bool:
    return job.is_ended or len(job.arrived) >= BLOCKS_AT_ONCE
