"""Prefill engine's side of the hand-over (`handover_intake.py` has the other, and both in a picture)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...ipc.handover_messages import HandedBlock, HandedBlocks, Prefill
from ...kv_store.block_file import BlockKind, HandoverSegment
from ..request import Request
from .prefix_cache import extend_hashes
from .tiers import CacheMemory


@dataclass(slots=True)
class _Outgoing:
    """Prompt whose blocks are handed over."""

    next_block: int
    end: int
    """Number of its full blocks."""
    queue: deque[tuple[BlockKind, bytes, int | None]] = field(default_factory=deque)
    """Blocks to hand over, held in their pool. A state is found by its hash once its turn has come."""
    is_computed: bool = False
    cached_tokens: int = 0


class HandoverOutlet:
    """Prefill engine's side, on the engine's thread."""

    def __init__(
        self, segment: HandoverSegment, blocks: CacheMemory, send: Callable[[HandedBlocks], None]
    ) -> None:
        self._segment, self._blocks, self._send = segment, blocks, send
        self._free = list(reversed(range(segment.num_slots)))
        self._open: dict[str, _Outgoing] = {}

    def expect(self, prefill: Prefill) -> None:
        """Hand over the blocks of a request that is about to be queued."""
        end = len(prefill.prompt_ids) // self._blocks.kv_cache.pool.block_size
        self._open[prefill.request_id] = _Outgoing(prefill.first_block, end)

    def note_computed(self, request: Request) -> None:
        """Queue the blocks that a request has by now, and hold them until they are copied."""
        if (out := self._open.get(request.request_id)) is None or out.is_computed:
            return
        kv_cache = self._blocks.kv_cache
        size = kv_cache.pool.block_size
        out.cached_tokens = request.num_cached or 0
        end = min(request.num_computed // size, out.end)
        extend_hashes(request, size, end)
        for index in range(out.next_block, end):
            self._hold(out, "kv", request.block_hashes[index], request.block_table[index])
        out.next_block = max(out.next_block, end)
        if end < out.end:
            return
        out.is_computed = True
        if kv_cache.windows is not None:
            for block_hash in request.block_hashes[kv_cache.windows.first_needed(end * size) : end]:
                if (block := self._blocks.index("window", block_hash)) is not None:
                    self._hold(out, "window", block_hash, block)
        if kv_cache.states is not None and end:
            out.queue.append(("state", request.block_hashes[end - 1], None))

    def _hold(self, out: _Outgoing, kind: BlockKind, block_hash: bytes, block: int) -> None:
        self._blocks.pool(kind).touch([block])
        out.queue.append((kind, block_hash, block))

    def pump(self) -> None:
        """Copy blocks into free slots, and say which."""
        for request_id, out in list(self._open.items()):
            handed: list[HandedBlock] = []
            while out.queue and self._free:
                kind, block_hash, block = out.queue.popleft()
                index = self._blocks.index(kind, block_hash) if block is None else block
                if index is not None:
                    handed.append(self._copy(kind, block_hash, index))
                if block is not None:
                    self._blocks.pool(kind).free([block])
            is_last = out.is_computed and not out.queue
            if handed or is_last:
                message = HandedBlocks(
                    request_id=request_id, blocks=handed, is_last=is_last, cached_tokens=out.cached_tokens
                )
                self._send(message)
            if is_last:
                del self._open[request_id]

    def _copy(self, kind: BlockKind, block_hash: bytes, index: int) -> HandedBlock:
        slot, size = self._free.pop(), self._blocks.memory.sizes[kind]
        self._blocks.memory.save(kind, index, self._segment.payload(slot, size))
        self._blocks.memory.record().wait()
        self._segment.seal(slot, kind, block_hash, size)
        return HandedBlock(slot=slot, kind=kind, block_hash=block_hash)

    def release(self, slots: list[int]) -> None:
        """Take slots back, and hand over what waited for them."""
        self._free += slots
        self.pump()

    def drop(self, request_id: str) -> None:
        """Hand over no more of a request: nobody wants it, or its blocks may be wrong."""
        if (out := self._open.pop(request_id, None)) is not None:
            for kind, _, block in out.queue:
                if block is not None:
                    self._blocks.pool(kind).free([block])

    def holding(self, kind: BlockKind) -> list[int]:
        """Return the blocks that wait to be copied."""
        queued = (item for out in self._open.values() for item in out.queue)
        return [block for each, _, block in queued if each == kind and block is not None]
