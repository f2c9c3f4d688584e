"""Hand-over of KV blocks from a prefill engine to a decode engine, through a segment of shared memory.

    decode engine                                  prefill engine
    begin: a prompt lacks blocks -- Prefill ------> expect
                                                    note_computed: blocks of a step
    poll: checks and caches blocks <- HandedBlocks -- pump: copies them into free slots
          -- TakenSlots --------------------------> release

Blocks are those of the prefix cache, so a request goes on from them as from a known prompt: the decode engine
computes the rest of its last block and draws the first token. Whatever is torn, lost or refused is computed
again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ...ipc.handover_messages import HandedBlock, HandedBlocks, Prefill, PrefillLink, TakenSlots
from ...ipc.messages import AbortRequest, StepOutputs
from ...kv_store.block_file import BlockKind, DamagedBlock, HandoverSegment
from ..request import Request
from .prefix_cache import extend_hashes
from .tiers import CacheMemory

log = logging.getLogger("llmbox.engine")

LEAST_TOKENS: Final = 64
"""Missing tokens from which on a prompt goes to the prefill engine. A shorter one has its first token sooner
in the decode engine, as it waits for no other prompt, and takes a few steps of `DECODE_PROMPT_TOKENS`.
"""
DECODE_PROMPT_TOKENS: Final = 4
"""Most prompt tokens of a decode engine's step beside streams: ends of last blocks, and short prompts."""
MOST_HANDOVERS: Final = 3
"""Times that a queued request is sent to the prefill engine, where blocks were lost on the way."""
COPY_SHARE: Final = 0.05
"""Share of the decode engine's time that taking blocks in has beside streams, one block a step at least."""


@dataclass(slots=True)
class _Incoming:
    """Request that waits for its blocks."""

    request: Request
    deaths: int = 0
    """Prefill engines that died with it."""
    asked_as: str = ""
    """Id of its last `Prefill`; empty: it has to be sent."""
    arrived: deque[HandedBlock] = field(default_factory=deque)
    to_come: int = 0
    """KV blocks that memory must have room for."""
    known: int = 0
    is_last: bool = False
    has_failed: bool = False


class HandoverIntake:
    """Decode engine's side, on the engine's thread."""

    def __init__(
        self,
        link: PrefillLink,
        segment: HandoverSegment,
        blocks: CacheMemory,
        clock: Callable[[], float] = time.monotonic,
        least_tokens: int = LEAST_TOKENS,
    ) -> None:
        self.link = link
        self.handed_tokens = 0
        self.num_damaged = 0
        self._segment, self._blocks, self._clock = segment, blocks, clock
        self._least_tokens = least_tokens
        self._waiting: dict[str, _Incoming] = {}
        self._asked: dict[str, _Incoming] = {}
        """By the id of their `Prefill`."""
        self._num_asked = 0
        self._deaths = link.deaths
        self._polled_at = clock()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def begin(self, request: Request) -> bool:
        """Have the prefill engine compute what a request's prompt lacks. True: it waits until `poll` returns
        it. Without room in memory it asks when it is admitted.
        """
        request.reads_later = False
        if self.link.is_given_up or request.images or request.num_handovers >= MOST_HANDOVERS:
            return False
        kv_cache, incoming = self._blocks.kv_cache, _Incoming(request)
        missing = self._missing(request)
        size = kv_cache.pool.block_size
        if missing * size < self._least_tokens:
            return False
        found = kv_cache.pool.find(request.block_hashes)
        room = kv_cache.pool.num_available - kv_cache.pool.num_idle(found)
        if missing > room - sum(each.to_come for each in self._waiting.values()):
            request.reads_later = True
            return False
        if request.num_cached is None and request.num_known is None:
            incoming.known = (kv_cache.lookup_blocks(request) - missing) * size
            request.prefix_end = kv_cache.why_prefix_ends(request, incoming.known)
        self._waiting[request.request_id] = incoming
        self._ask(incoming)
        return True

    def _missing(self, request: Request) -> int:
        """Return how many full blocks of the request would have to be computed."""
        kv_cache = self._blocks.kv_cache
        usable = kv_cache.lookup_blocks(request)
        return usable - len(kv_cache.find_prefix(request)[0]) if usable else 0

    def _ask(self, incoming: _Incoming) -> None:
        """Send the request, or leave that to a `poll` after the prefill engine is ready."""
        incoming.asked_as, incoming.is_last = "", False
        if not self.link.is_ready:
            return
        request, pool = incoming.request, self._blocks.kv_cache.pool
        blocks = self._blocks.kv_cache.lookup_blocks(request)
        first = len(pool.find(request.block_hashes[:blocks]))
        request.num_handovers += 1
        self._num_asked += 1
        # As many tokens as tell that it has the long factors of RoPE, where it has.
        count = max(blocks * pool.block_size, request.short_context * request.is_long) + 1
        incoming.asked_as = f"{request.request_id} {self._num_asked}"
        incoming.to_come = blocks - first
        self._asked[incoming.asked_as] = incoming
        self.link.send(
            Prefill(
                request_id=incoming.asked_as,
                prompt_ids=list(request.token_ids[:count]),
                first_block=first,
                priority=request.priority,
                tenant=request.tenant,
                cache_namespace=(
                    request.cache_namespace.partition("\0")[2] if request.adapter else request.cache_namespace
                ),
                adapter=request.adapter,
            )
        )

    def poll(self, *, hurry: bool) -> list[Request]:
        """Take in the blocks that have arrived; return the requests that wait for no more.

        `hurry`: no stream waits for this step.
        """
        taken: list[int] = []
        for message in self.link.receive(is_waiting=bool(self._asked)):
            match message:
                case HandedBlocks():
                    self._arrive(message, taken)
                case StepOutputs():
                    for output in message.outputs:
                        incoming = self._asked.get(output.request_id)
                        if incoming is not None and output.finish_reason in {"error", "abort"}:
                            incoming.has_failed = True
        if self.link.deaths != self._deaths:
            self._deaths = self.link.deaths
            self._note_death()
            taken.clear()  # all slots are free for the next engine
        self._copy(taken, hurry=hurry)
        done = [each.request for each in list(self._waiting.values()) if self._is_done(each)]
        if taken:
            self.link.send(TakenSlots(slots=taken))
        return done

    def _arrive(self, message: HandedBlocks, taken: list[int]) -> None:
        incoming = self._asked.get(message.request_id)
        if incoming is None:
            taken += [block.slot for block in message.blocks]
            return
        incoming.arrived += message.blocks
        incoming.is_last = message.is_last
        if incoming.request.num_handovers == 1:  # later it has what it computed before
            incoming.known = max(incoming.known, message.cached_tokens)

    def _note_death(self) -> None:
        """Have everything that is not in memory yet computed again. What waits in slots is lost with them."""
        self._asked.clear()
        for incoming in self._waiting.values():
            incoming.deaths += bool(incoming.asked_as)
            incoming.arrived.clear()
            incoming.asked_as, incoming.is_last = "", False

    def _copy(self, taken: list[int], *, hurry: bool) -> None:
        """Copy blocks from their slots. Beside streams as many as `COPY_SHARE` of the time allows."""
        now = self._clock()
        end = now + COPY_SHARE * (now - self._polled_at)
        self._polled_at = now
        for incoming in self._waiting.values():
            while incoming.arrived:
                self._take(incoming, incoming.arrived.popleft(), taken)
                if not hurry and self._clock() >= end:
                    return

    def _take(self, incoming: _Incoming, handed: HandedBlock, taken: list[int]) -> None:
        blocks, kind = self._blocks, handed.kind
        taken.append(handed.slot)
        incoming.to_come -= kind == "kv"
        if blocks.index(kind, handed.block_hash) is not None:
            return
        try:
            payload = self._segment.open(handed.slot, kind, handed.block_hash, blocks.memory.sizes[kind])
        except (DamagedBlock, KeyError) as error:
            self.num_damaged += 1
            log.warning("a block of the prefill engine is refused and computed again: %s", error)
            return
        if (index := blocks.allocate(kind)) is None:
            incoming.request.reads_later = True
            return
        blocks.memory.load(kind, index, payload)
        blocks.memory.record().wait()
        blocks.keep(kind, index, handed.block_hash)
        if kind == "kv":
            self.handed_tokens += blocks.kv_cache.pool.block_size

    def _is_done(self, incoming: _Incoming) -> bool:
        """Return True, and forget the request, if it waits for no more blocks."""
        request = incoming.request
        over = self.link.is_given_up or incoming.deaths > 1 or incoming.has_failed
        if over:  # it may have caused these deaths: then it is found guilty where it runs
            request.num_handovers = MOST_HANDOVERS
            if incoming.asked_as and not incoming.has_failed:
                self.link.send(AbortRequest(request_id=incoming.asked_as))
        elif not incoming.asked_as:
            self._ask(incoming)
            return False
        elif not incoming.is_last or incoming.arrived:
            return False
        if incoming.has_failed:
            self._distrust(request)
        self._close(incoming)
        self._blocks.refresh(request)
        if not over and self._is_lacking(request):
            self._waiting[request.request_id] = incoming
            self._ask(incoming)
            return False
        if request.num_cached is None and request.num_known is None:
            request.num_known = incoming.known
        return True

    def _is_lacking(self, request: Request) -> bool:
        """Return True if blocks were lost on the way and the prefill engine has to hand them over again."""
        missing = self._missing(request) * self._blocks.kv_cache.pool.block_size
        may_ask = request.num_handovers < MOST_HANDOVERS and not request.reads_later
        return may_ask and missing >= self._least_tokens

    def _distrust(self, request: Request) -> None:
        """Drop the blocks of a request that failed in the prefill engine: their content may be wrong."""
        pool = self._blocks.kv_cache.pool
        found = pool.find(request.block_hashes)
        pool.touch(found)
        pool.uncache(found)
        pool.free(found)

    def _close(self, incoming: _Incoming) -> None:
        del self._waiting[incoming.request.request_id]
        self._asked.pop(incoming.asked_as, None)
        if incoming.arrived:
            self.link.send(TakenSlots(slots=[block.slot for block in incoming.arrived]))
            incoming.arrived.clear()

    def forget(self, request: Request) -> None:
        """Stop waiting for a request that is gone."""
        incoming = self._waiting.get(request.request_id)
        if incoming is None:
            return
        self._close(incoming)
        if incoming.asked_as:
            self.link.send(AbortRequest(request_id=incoming.asked_as))

    def stats(self) -> dict[str, int]:
        """Return the fields of `EngineStats` about the prefill engine."""
        return {
            "handed_tokens": self.handed_tokens,
            "handed_damaged": self.num_damaged,
            "prefill_restarts": self.link.deaths,
            "prefill_pid": self.link.pid,
        }


@dataclass(slots=True)
class _Outgoing:
    """Prompt whose blocks are handed over."""

    next_block: int
    end: int
    """Number of its full blocks."""
    queue: deque[tuple[BlockKind, bytes, int | None]] = field(default_factory=deque)
    """Blocks to hand over. Those of all tokens are held in their pool. Windows and states, whose pools have
    room for running requests only, are found by their hashes once their turn has come."""
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
            block = request.block_table[index]
            self._blocks.pool("kv").touch([block])
            out.queue.append(("kv", request.block_hashes[index], block))
        out.next_block = max(out.next_block, end)
        if end < out.end:
            return
        out.is_computed = True
        if kv_cache.windows is not None:
            first = kv_cache.windows.first_needed(end * size)
            out.queue += (("window", each, None) for each in request.block_hashes[first:end])
        if kv_cache.states is not None and end:
            out.queue.append(("state", request.block_hashes[end - 1], None))

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
        """Stop the hand-over of a request: it is gone, or its blocks may be wrong."""
        if (out := self._open.pop(request_id, None)) is not None:
            for kind, _, block in out.queue:
                if block is not None:
                    self._blocks.pool(kind).free([block])

    def holding(self, kind: BlockKind) -> list[int]:
        """Return the blocks that wait to be copied."""
        queued = (item for out in self._open.values() for item in out.queue)
        return [block for each, _, block in queued if each == kind and block is not None]
