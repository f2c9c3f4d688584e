"""Host tier of the prefix cache: blocks that the memory of a GPU evicted, in pinned main memory.

the device evicts a block -> `note_evicted` queues its copy to the host, before anything overwrites it
a request needs it again  -> `ReadAhead` holds it, copies it into a free block and releases it

A block that was copied back to the device is the first to be evicted here, so that both together hold as many
as they can; while it is here, the device can evict it again without a copy. Chain hashes have the namespace
in them, so a block is found by its own key alone. On a CPU device and host are the same memory: there is no
such tier.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from ...kv_store.block_file import BlockKind
from .block_pool import BlockMemory, CopyEvent

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
