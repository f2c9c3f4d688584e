"""KV cache manager: allocates and frees the blocks of requests, and slots of recurrent state beside them. It
is the only writer of block tables.

    request.block_table   | shared with others, full | private, full | private, partly filled | reserved |
    request.num_computed  -------------------------------------------------->

A table only grows at its end until the request leaves. Shared blocks are full, so no request writes into
them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from ...config import SchedulerConfig
from ...errors import DoesNotFit
from ...ipc.messages import PrefixMissReason
from ...kv_store.block_file import BlockKind
from ..adapter_slots import AdapterSlots
from ..request import Request
from ..request_queue import is_premium
from ..step import ScheduledRequest
from .block_pool import BlockPool
from .handover import HandoverIntake, HandoverOutlet
from .prefix_cache import PrefixUses, extend_hashes, first_block_digest
from .state_manager import StateManager, StatePool, WindowManager
from .tiers import KVTiers


class StepCopies(NamedTuple):
    """(source, destination) pairs to copy before a step."""

    blocks: list[tuple[int, int]]
    states: list[tuple[int, int]]


MAX_PREEMPTIONS = 4
"""Number of preemptions after which a request is pinned; see `KVCacheManager.is_pinned`."""


class KVCacheManager:
    """Block tables of all requests: admission, growth, prefix cache and release."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.pool = pool
        self.states = None
        if config.state_slots:
            slots = StatePool(config.state_slots)
            self.states = StateManager(
                slots, pool.block_size, caching=pool.caching, drafts=config.draft_rows > 0
            )
        self._config = config
        self.windows = None
        if config.window:
            kept = BlockPool(config.window_blocks, pool.block_size, enable_prefix_cache=pool.caching)
            self.windows = WindowManager(kept, config.window)
        self._watermark = int(config.watermark * pool.num_blocks)
        self._premium_blocks = int(config.premium_share * pool.num_blocks)
        self._premium_held = 0
        self.prefix_queries = 0
        self.prefix_hits = self.disk_hits = self.host_hits = 0
        self.uses = PrefixUses()
        self.tiers: KVTiers | None = None
        """Tiers behind the pools; set once the engine has them."""
        self.intake: HandoverIntake | None = None
        """Blocks from the prefill engine; set in a decode engine."""
        self.outlet: HandoverOutlet | None = None
        """Blocks for the decode engine; set in a prefill engine."""
        self.adapters: AdapterSlots | None = None
        """Slots of adapters; set once the engine has some."""
        self.computed_by: list[str | None] = [None] * pool.num_blocks
        """Id of the request that last filled each block; meaningless for free blocks."""

    def refuse_impossible(self, request: Request) -> None:
        """Raise `DoesNotFit` for a request that would not fit even if it were alone."""
        prompt, output = request.num_prompt, request.params.max_tokens
        if prompt + output > self._config.context:
            raise DoesNotFit(
                f"prompt of {prompt} tokens + max_tokens {output} = {prompt + output} exceeds "
                f"the context of {self._config.context} tokens"
            )
        need = self._reserved(request)
        if need > self.pool.num_blocks:
            size = self.pool.block_size
            raise DoesNotFit(
                f"prompt of {prompt} tokens + max_tokens {output} needs {need * size} KV slots, "
                f"the model has {self.pool.num_blocks * size} in all"
            )

    def is_pinned(self, request: Request) -> bool:
        """Return True if the request is pinned: it reserves its worst case at admission, never grows and is
        never preempted.

        A request is pinned after `MAX_PREEMPTIONS`. Every request fits the pool alone, so it is admitted at
        the latest when all others have ended: preemptions are bounded, and every request finishes.
        """
        return self._config.batching == "static" or request.preemptions >= MAX_PREEMPTIONS

    def allocate(self, request: Request, sibling: Request | None, *, alone: bool) -> StepCopies | None:
        """Build the block table for all tokens so far, reusing cached blocks and those of a `sibling`.

        Returns the copies to make before the step; None, with nothing changed, when blocks or slots are
        short. `alone`: no other request runs, so no block needs to stay free.

        A recurrent state is only kept at the ends of blocks, and a window moves on: then forks share what the
        prefix cache has.
        """
        shared, known = self.find_prefix(request)
        hits = computed = len(shared) * self.pool.block_size
        if self.states is not None or self.windows is not None:
            sibling = None
        if sibling is not None and (forked := self._forkable(request)) > computed:
            shared, computed = sibling.block_table[: forked // self.pool.block_size], forked
        size = self._admission_size(request)
        fresh = size - len(shared)
        if not self._has_room(request, shared, fresh, alone=alone):
            return None
        if request.adapter and self.adapters is not None and not self.adapters.hold(request):
            return None
        self._count_prefix(request, hits)
        self.pool.touch(shared)
        request.block_table = shared + self.pool.allocate(fresh)
        request.num_computed = request.num_scheduled = computed
        request.admissions += 1
        self._count_premium(request, size)
        if self.windows is not None:
            self.windows.allocate(request, len(shared))
        if self.states is not None:
            return StepCopies([], self.states.allocate(request, len(shared), known))
        if sibling is None or computed % self.pool.block_size == 0:
            return StepCopies([], [])
        partial = len(shared)  # copy-on-write: the sibling continues to write into its own block
        return StepCopies([(sibling.block_table[partial], request.block_table[partial])], [])

    def known_tokens(self, request: Request, sibling: Request | None) -> int:
        """Return how many tokens `allocate` would find computed, in the cache or by the sibling."""
        shared, _ = self.find_prefix(request)
        can_fork = sibling is not None and self.states is None and self.windows is None
        return max(len(shared) * self.pool.block_size, self._forkable(request) if can_fork else 0)

    def fits(self, request: Request) -> bool:
        """Return True if `allocate` would find blocks beside other requests, without a sibling's blocks."""
        shared, _ = self.find_prefix(request)
        return self._has_room(request, shared, self._admission_size(request) - len(shared), alone=False)

    def _admission_size(self, request: Request) -> int:
        pinned = self.is_pinned(request)
        return self._reserved(request) if pinned else self.pool.blocks_for(request.num_tokens)

    def _has_room(self, request: Request, shared: list[int], fresh: int, *, alone: bool) -> bool:
        if self.states is not None and not self.states.pool.num_available:
            return False
        left = self.pool.num_available - self.pool.num_idle(shared) - fresh
        return left >= self._kept_free(request, alone=alone)

    def extend(self, request: Request, *, alone: bool) -> bool:
        """Append one block to a decoding request's table; False when blocks are short."""
        reserve = 0 if alone else self._kept_for_premium(request)
        if self.pool.num_available - 1 < reserve:
            return False
        request.block_table += self.pool.allocate(1)
        self._count_premium(request, 1)
        return True

    def cache_blocks(self, request: Request, start: int) -> None:
        """Add the blocks that the tokens from `start` to `num_computed` filled to the prefix cache.

        Called only after a step succeeded, so that a cached block always holds computed KV.
        """
        size = self.pool.block_size
        first, last = start // size, request.num_computed // size
        if first == last or not self.pool.caching:
            return
        extend_hashes(request, size, last)
        if first == 0:
            self.pool.history.note_first_block(first_block_digest(request, size), request.block_hashes[0])
        for index in range(first, last):
            self.pool.cache_block(request.block_table[index], request.block_hashes[index])
            self.computed_by[request.block_table[index]] = request.request_id
            if self.tiers is not None:
                self.tiers.note_cached(request, "kv", request.block_hashes[index])
        if self.windows is not None:
            self.windows.cache_blocks(request, first, last)
            if self.tiers is not None:
                for block_hash in request.block_hashes[first:last]:
                    self.tiers.note_cached(request, "window", block_hash)

    def prepare_row(self, row: ScheduledRequest) -> None:
        """Allocate the window blocks and state slots of a scheduled row."""
        if self.states is not None:
            self.states.plan_saves(row)
        if self.windows is not None:
            self.windows.cover(row.request, row.end)

    def commit_row(self, row: ScheduledRequest) -> None:
        """Cache the blocks and states of a row whose step succeeded. `num_computed` is up to date."""
        size, end = self.pool.block_size, row.request.num_computed
        if row.start // size != end // size:
            self.cache_blocks(row.request, row.start)
            if self.windows is not None:
                self.windows.trim(row.request, end)
        if row.saves and self.states is not None:
            for block_hash, is_turn_end in self.states.apply_saves(row, valid=True):
                if self.tiers is not None:
                    self.tiers.note_state(row.request, block_hash, is_turn_end=is_turn_end)
        if self.outlet is not None:
            self.outlet.note_computed(row.request)

    def discard_row(self, row: ScheduledRequest) -> None:
        """Drop the states that a row saved: its step failed, or its request left since."""
        if row.saves and self.states is not None:
            self.states.apply_saves(row, valid=False)

    def free(self, request: Request, *, suspect: bool = False) -> None:
        """Free the request's whole block table. `suspect`: its KV may be wrong, so its blocks leave the
        prefix cache.
        """
        if self.tiers is not None:
            (self.tiers.note_suspect if suspect else self.tiers.note_ended)(request)
        if self.intake is not None:  # where it was preempted
            request.reads_later, request.num_handovers = True, 0
        if self.outlet is not None and suspect:
            self.outlet.drop(request.request_id)
        if suspect:
            self.pool.uncache(request.block_table)
        if self.states is not None:
            self.states.free(request, suspect=suspect)
        if self.windows is not None:
            self.windows.free(request, suspect=suspect)
        if request.adapter and self.adapters is not None:
            self.adapters.release(request, suspect=suspect)
        self.pool.free(request.block_table)
        self._count_premium(request, -len(request.block_table))
        request.block_table = []
        request.num_computed = request.num_scheduled = request.num_pending = 0
        request.admissions += 1

    def read_ahead(self, request: Request) -> bool:
        """Begin to read blocks of a new request from the tiers, or have the prefill engine compute them.
        True: it is not to be queued until `take_in` returns it.
        """
        if self.tiers is not None and self.tiers.reads.begin(request):
            return True
        return self.intake is not None and self.intake.begin(request)

    def read_again(self, request: Request) -> bool:
        """Read what memory had no room for when the request came, or has lost since, as `read_ahead` does."""
        if request.reads_later:
            return self.fits(request) and self.read_ahead(request)
        return self.intake is not None and self.fits(request) and self.intake.begin(request)

    def take_in(self, *, is_decoding: bool) -> list[Request]:
        """Cache the blocks that have arrived; return the requests that need not wait any more."""
        tiers, intake = self.tiers, self.intake
        done = tiers.reads.poll() if tiers is not None and tiers.reads.is_reading else []
        if intake is None:
            return done
        return [request for request in done if not intake.begin(request)] + intake.poll(hurry=not is_decoding)

    def forget(self, request: Request) -> None:
        """Stop reading for a request that is gone."""
        if self.tiers is not None:
            self.tiers.reads.forget(request)
        if self.intake is not None:
            self.intake.forget(request)

    def loading(self, kind: BlockKind) -> list[int]:
        """Return the blocks or slots that are being read from the tiers, or wait to be handed over: used
        beside block tables.
        """
        reading = [] if self.tiers is None else self.tiers.reads.loading(kind)
        return reading + ([] if self.outlet is None else self.outlet.holding(kind))

    def slots_used(self, running: Collection[Request]) -> int:
        """Return the number of KV slots that hold a token of the running requests."""
        computed = sum(request.num_computed for request in running)
        in_tables = sum(len(request.block_table) for request in running)
        return computed - (in_tables - self.pool.num_used) * self.pool.block_size

    def check(self, running: Sequence[Request]) -> None:
        """Assert that states, windows and adapters of running requests are accounted for."""
        if self.states is not None:
            self.states.check(running, self.loading("state"))
        if self.windows is not None:
            self.windows.check(running, self.loading("window"))
        if self.adapters is not None:
            self.adapters.check(list(running))

    def _reserved(self, request: Request) -> int:
        """Return the blocks of the request at its maximum length. The last token's KV is never computed.

        Static batching is the baseline of servers that reserve contiguous memory for the whole context.
        """
        if self._config.batching == "static":
            return self.pool.blocks_for(self._config.context)
        return self.pool.blocks_for(
            max(request.num_tokens, request.num_prompt + request.params.max_tokens - 1)
        )

    def find_prefix(self, request: Request) -> tuple[list[int], int]:
        """Return cached blocks to share, and the number of cached blocks, which is larger where state or
        window was not kept for all. Never blocks of all tokens: the logits of the last must be computed.
        """
        usable = self.lookup_blocks(request)
        if not usable:
            return [], 0
        extend_hashes(request, self.pool.block_size, usable)
        blocks = self.pool.find(request.block_hashes[:usable])
        return blocks[: self.usable_end(request.block_hashes[: len(blocks)], self.has)], len(blocks)

    def usable_end(self, hashes: Sequence[bytes], has: Callable[[BlockKind, bytes], bool]) -> int:
        """Return after how many of these blocks a request can resume. `has`: a window or state is there."""
        ends: Iterable[int] = range(len(hashes), 0, -1)
        if self.windows is not None:
            ends = self.windows.usable_ends([has("window", each) for each in hashes])
        if self.states is not None:
            ends = (end for end in ends if has("state", hashes[end - 1]))
        return next(iter(ends), 0)

    def has(self, kind: BlockKind, block_hash: bytes) -> bool:
        """Return True if memory has the window block or the state of this hash, not only keys and values."""
        if kind == "window":
            return self.windows is not None and self.windows.pool.has_prefix(block_hash)
        return self.states is not None and self.states.pool.has(block_hash)

    def lookup_blocks(self, request: Request) -> int:
        """Return how many blocks of the request are looked up in the prefix cache."""
        may_look = self.pool.caching and not _needs_all_rows(request)
        return self._usable_blocks(request) if may_look else 0

    def _usable_blocks(self, request: Request) -> int:
        return (request.num_tokens - 1) // self.pool.block_size

    def why_prefix_ends(self, request: Request, hits: int) -> PrefixMissReason:
        """Return why the prefix ended after `hits` tokens. Called before this admission evicts any block."""
        if not self.pool.caching:
            return "off"
        if _needs_all_rows(request):
            return "pooling" if request.pools else "prompt_logprobs"
        size, usable = self.pool.block_size, self._usable_blocks(request)
        found = hits // size
        if found == usable:
            return "complete" if usable else "short"
        if request.disk_end is not None:
            return request.disk_end
        if self.pool.has_prefix(request.block_hashes[found]):
            kept = self.states.pool.find(request.block_hashes)[0] if self.states and self.windows else found
            return "evicted" if self.states is None or kept > found else "state"
        first = first_block_digest(request, size) if found == 0 else None
        return self.pool.history.why_absent(request.block_hashes[found], first)

    def _forkable(self, request: Request) -> int:
        """Return the number of tokens to reuse from a sibling that computed the same prompt."""
        return 0 if _needs_all_rows(request) else min(request.num_prompt, request.num_tokens - 1)

    def _kept_free(self, request: Request, *, alone: bool) -> int:
        """Return the blocks that an admission must leave free: for running requests to grow, and the rest of
        the premium share.
        """
        if alone or self._config.batching == "static":
            return 0
        return self._watermark + self._kept_for_premium(request)

    def _kept_for_premium(self, request: Request) -> int:
        """Return the unused part of the premium share, which serves as prefix cache until it is needed."""
        return 0 if is_premium(request) else max(0, self._premium_blocks - self._premium_held)

    def _count_premium(self, request: Request, blocks: int) -> None:
        if is_premium(request):
            self._premium_held += blocks

    def _count_prefix(self, request: Request, hits: int) -> None:
        """Count prefix-cache hits, at first admission only: what a preempted request finds saved nothing."""
        if request.num_cached is None:
            hits = hits if request.num_known is None else min(hits, request.num_known)
            request.num_cached = min(hits, request.num_prompt)
            size, found = self.pool.block_size, request.num_cached
            request.num_disk = min(request.num_disk_blocks * size, found)
            request.num_host = min(request.num_host_blocks * size, found - request.num_disk)
            request.prefix_end = end = request.prefix_end or self.why_prefix_ends(request, hits)
            if end not in {"off", "prompt_logprobs", "pooling"}:
                whole = self._usable_blocks(request) * self.pool.block_size
                request.num_prefix_lookup_tokens = min(whole, request.num_prompt)
            self.prefix_queries += request.num_prompt if self.pool.caching else 0
            self.prefix_hits += request.num_cached
            self.disk_hits += request.num_disk
            self.host_hits += request.num_host
            if blocks := hits // size:
                self.uses.note(request.block_hashes[blocks - 1], blocks, size, request.request_id)


def _needs_all_rows(request: Request) -> bool:
    """Return True if every prompt row must be computed, so that the prefix cache cannot be used: for prompt
    log-probabilities, until the first token, and for pooling of other rows than the last.
    """
    if request.pools:
        return request.params.pooling != "last"
    return request.params.prompt_logprobs is not None and request.num_output == 0
