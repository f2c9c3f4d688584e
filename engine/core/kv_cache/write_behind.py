"""Write-behind: blocks that were cached in memory are copied and given to the store's writer.

A block that was cached waits, `pump` copies it, and the store's thread writes the file. A block that is
evicted before it was copied is not written.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...kv_store.block_file import BlockAddress, BlockKind
from ...kv_store.store_threads import BlockWrite
from ..request import Request
from .block_pool import CopyEvent

if TYPE_CHECKING:
    from .tiers import CacheMemory, DiskBlocks

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
        """Have a block that was just cached written, unless it is on disk."""
        address = self._disk.address(request, kind, block_hash)
        if not self._disk.store.has(address):
            block = _PendingBlock(kind, block_hash, address, bool(request.tenant), is_turn_end)
            self._pending[kind, block_hash] = block
            if len(self._pending) > self._most_pending:
                self._pending.popitem(last=False)
                self.num_passed += 1

    def note_state(self, request: Request, block_hash: bytes, *, is_turn_end: bool) -> None:
        """Have a state that was just kept written, if it is the end of a turn or small."""
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
        """Add what the time since the last call allows."""
        now = self._clock()
        self._credit = min(BUSY_BURST, self._credit + (now - self._credited) * BUSY_SHARE)
        self._credited = now

    def finish_copies(self, *, wait: bool = False) -> None:
        """Hand on the copies that are done, or `wait` for all."""
        while self._copies and (wait or self._copies[0].event.is_done):
            copies = self._copies.popleft()
            copies.event.wait()
            for block, buffer in copies.saved:
                write = BlockWrite(block.address, buffer, block.has_quota, block.is_turn_end)
                self._disk.store.write(write)
                self._copying -= len(buffer)
