"""Memory of layers that do not read all tokens: KV blocks of sliding windows, freed behind the window, and
slots of recurrent state, with the states that the prefix cache keeps.

    request.window_table   | 0 0 0 ... | blocks from `window_begin` on, to the end of the scheduled tokens |

The pool has room for the windows of all running requests and for the tokens of a step (`pool_blocks`), so
`cover` always finds blocks, and no request is preempted for them. Freed blocks stay in the prefix cache until
they are needed.

A state is a function of all tokens before it, so a prefix can only go on from a state that was kept. Kept
are, all at the ends of full blocks:

    the end of a prompt              for its next turn, for other answers to it
    the end of an answer             one state that moves on, every `STATE_STRIDE` tokens
    where a prompt left known blocks another prompt may branch off there
    every so many tokens of a prompt for edits and branches in the middle of it
    32, 64, 128, ... before its end  for another question about the same text
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ..request import Request
from ..step import ScheduledRequest
from .block_pool import BlockPool


def pool_blocks(window: int, block_size: int, running: int, step_tokens: int) -> int:
    """Return the blocks that `running` requests need at most, with `step_tokens` in the steps in flight."""
    return running * (-(-window // block_size) + 3) + 2 * -(-step_tokens // block_size)


class WindowManager:
    """Only writer of `Request.window_table` and `window_begin`."""

    def __init__(self, pool: BlockPool, window: int) -> None:
        """`window`: tokens that a row may read, itself included."""
        self.pool = pool
        self._window = window
        self.end_loads: Callable[[], None] = lambda: None
        """Wait for the blocks that are on their way into the pool, which has room for those of requests only.
        `KVTiers` sets it."""

    def first_needed(self, position: int) -> int:
        """Return the index of the first block that a token at `position` may read."""
        return max(0, position - self._window + 1) // self.pool.block_size

    def usable_ends(self, has: Sequence[bool]) -> list[int]:
        """Return the prefixes, in blocks and longest first, that a request can resume from: all blocks of the
        window before their end are available. `has`: for each block, whether it is.
        """
        ends, run = list[int](), 0
        for index, is_here in enumerate(has):
            run = run + 1 if is_here else 0
            needed = index + 1 - self.first_needed((index + 1) * self.pool.block_size)
            if run >= needed:
                ends.append(index + 1)
        return ends[::-1]

    def allocate(self, request: Request, blocks: int) -> None:
        """Share the cached window of the first `blocks` blocks, one of `usable_ends`."""
        first = self.first_needed(blocks * self.pool.block_size)
        shared = [self.pool.find((block_hash,))[0] for block_hash in request.block_hashes[first:blocks]]
        self.pool.touch(shared)
        request.window_begin, request.window_table = first, [0] * first + shared

    def cover(self, request: Request, end: int) -> None:
        """Allocate the blocks of tokens up to `end`."""
        missing = self.pool.blocks_for(end) - len(request.window_table)
        if missing > self.pool.num_available:
            self.end_loads()
        if missing > 0:
            request.window_table += self.pool.allocate(missing)

    def trim(self, request: Request, position: int) -> None:
        """Free the blocks that tokens from `position` on do not read, once those up to there are computed and
        cached: a prompt may leave this one within a chunk. Steps in flight may read them: a step that writes
        to them runs later.
        """
        first = min(self.first_needed(position), len(request.window_table))
        if first > request.window_begin:
            self.pool.free(request.window_table[request.window_begin : first])
            request.window_table[request.window_begin : first] = [0] * (first - request.window_begin)
            request.window_begin = first

    def cache_blocks(self, request: Request, first: int, last: int) -> None:
        """Add the blocks `first` .. `last` - 1 to the prefix cache. Their hashes are known."""
        for index in range(max(first, request.window_begin), last):
            self.pool.cache_block(request.window_table[index], request.block_hashes[index])

    def free(self, request: Request, *, suspect: bool) -> None:
        blocks = request.window_table[request.window_begin :]
        if suspect:
            self.pool.uncache(blocks)
        self.pool.free(blocks)
        request.window_table, request.window_begin = [], 0

    def check(self, running: Sequence[Request], loading: Sequence[int] = ()) -> None:
        self.pool.check()
        held = Counter(loading)
        for request in running:
            assert not any(request.window_table[: request.window_begin])
            held.update(request.window_table[request.window_begin :])
        self.pool.check_holders(held)


class StatePool:
    """Allocates slots and takes them back. Kept states are found by the chain hash of their last block.

    A slot is always in exactly one of three states:

        free      no content worth keeping
        kept      holds the state after a known prefix; taken last, least recently used first, where one at
                  the end of a prompt or an answer is passed over once
        used      of a running sequence, or being written by a launched step
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._passed_over: set[bytes] = set()
        """Kept states that `allocate` does not evict when it meets them first."""
        self.evictions = 0
        """Number of kept states that `allocate` evicted."""
        self.on_evict: Callable[[int, bytes], None] | None = None
        """Called with a slot that is evicted and its hash, while its content is there."""

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_slots - self.num_available

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, spared: int | None = None, leave: int = 0) -> int | None:
        """Allocate a slot of undefined content, but not `spared`; None if there is none. `leave`: number of
        free slots that must stay free.
        """
        if len(self._free) > leave:
            return self._free.pop()
        while (oldest := next((key for key, slot in self._kept.items() if slot != spared), None)) is not None:
            if oldest not in self._passed_over:
                self.evictions += 1
                slot = self._kept.pop(oldest)
                if self.on_evict is not None:
                    self.on_evict(slot, oldest)
                return slot
            self._passed_over.remove(oldest)
            self._kept.move_to_end(oldest)
        return None

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def find(self, hashes: Sequence[bytes]) -> tuple[int, int | None]:
        """Return the longest prefix in blocks with a kept state, and its slot: (0, None) if there is none."""
        for blocks in range(len(hashes), 0, -1):
            if (slot := self._kept.get(hashes[blocks - 1])) is not None:
                return blocks, slot
        return 0, None

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self._kept

    def touch(self, block_hash: bytes) -> None:
        self._kept.move_to_end(block_hash)

    def keep(self, slot: int, block_hash: bytes, *, is_end: bool = False) -> None:
        """Keep the content of a used slot for the prefix cache. A second copy of a state is freed.

        `is_end`: it is the end of a prompt or an answer, where the next turn continues.
        """
        if is_end:
            self._passed_over.add(block_hash)
        if block_hash in self._kept:
            self._kept.move_to_end(block_hash)
            self.free(slot)
        else:
            self._kept[block_hash] = slot

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Free the kept states of these prefixes."""
        for block_hash in hashes:
            self._passed_over.discard(block_hash)
            if (slot := self._kept.pop(block_hash, None)) is not None:
                self.free(slot)

    def check(self, used: Sequence[int]) -> None:
        """Assert that free + kept + used = all. `used`: slots of running sequences and of launched steps."""
        slots = [*self._free, *self._kept.values(), *used]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or in two places"
        assert self._passed_over <= self._kept.keys()


NO_SLOT: Final = -1
STATE_STRIDE = 32
"""Tokens between two states that are kept of an answer."""
STATES_PER_PROMPT, PROMPT_SHARE = 8, 8
"""Fewest states in the middle of a prompt; it may have one of `PROMPT_SHARE` slots, where these are more."""
DRAFT_SLOTS = 8
"""Free slots that are left for the states between draft tokens."""
MIN_STATE_DISTANCE, CLOSE_STATES = 512, 64
"""Fewest tokens between the states in the middle of a prompt, where slots are few and where they are many."""


class StateManager:
    """Only writer of `Request.state_slot` and of what belongs to it."""

    def __init__(self, pool: StatePool, block_size: int, *, caching: bool, drafts: bool) -> None:
        self.pool = pool
        self._left_free = min(DRAFT_SLOTS, pool.num_slots // 4) if drafts else 0
        self._block_size = block_size
        self._stride = max(block_size, STATE_STRIDE // block_size * block_size)
        self._caching = caching
        self._per_prompt = max(STATES_PER_PROMPT, pool.num_slots // PROMPT_SHARE)
        self._written: set[int] = set()
        """Slots that launched steps save states to."""

    def allocate(self, request: Request, blocks: int, known: int) -> list[tuple[int, int]]:
        """Take a slot for the request, which goes on after its first `blocks` blocks. Returns the (source,
        destination) slots to copy. There must be an available slot.

        `known`: number of its blocks whose KV is cached, where another prompt left this one.
        """
        source = None
        if blocks:
            found, source = self.pool.find(request.block_hashes[:blocks])
            assert found == blocks
            self.pool.touch(request.block_hashes[blocks - 1])
        slot = self.pool.allocate(spared=source)
        if slot is None:  # the state that it goes on from is in the last available slot
            assert source is not None
            self.pool.drop([request.block_hashes[blocks - 1]])
            slot = self.pool.allocate()
        assert slot is not None
        request.state_slot, request.state_marks = slot, self._marks(request, known)
        return [] if source is None or source == slot else [(source, slot)]

    def _marks(self, request: Request, known: int) -> tuple[int, ...]:
        """Return the positions of its tokens so far whose states are to be kept.

        A prompt that leaves this one computes again at most `distance` tokens of it, and at most as many as
        follow where it leaves, or 64.
        """
        if not self._caching:
            return ()
        size, count = self._block_size, request.num_tokens
        least = CLOSE_STATES if self._per_prompt > STATES_PER_PROMPT else MIN_STATE_DISTANCE
        distance = max(least, -(-count // self._per_prompt))
        distance = -(-distance // size) * size
        last = (count - 1) // size * size
        before, back = list[int](), self._stride
        while back < min(2 * distance, last):
            before.append(last - back)
            back *= 2
        marks = {*range(distance, last, distance), *before, known * size, last}
        return tuple(sorted(marks - {0}))

    def plan_saves(self, row: ScheduledRequest) -> None:
        """Take slots for the states that are to be kept of the row's tokens."""
        if not self._caching:
            return
        request, found = row.request, list[tuple[int, int]]()
        wanted = [mark for mark in request.state_marks if row.start < mark <= row.end]
        if not wanted and row.start >= request.num_prompt and row.end % self._stride == 0:
            wanted = [row.end]
        for position in wanted:
            if (slot := self.pool.allocate(leave=self._left_free)) is None:
                break
            self._written.add(slot)
            found.append((position, slot))
        row.saves = found

    def plan_drafts(self, row: ScheduledRequest) -> None:
        """Take slots for the states before each draft, to go back to where one is rejected. There must be a
        free slot for each.
        """
        self._free_saves(row)
        wanted = [*range(row.start + 1, row.end)]
        if self._caching and row.end % self._stride == 0 and self.pool.num_free > len(wanted):
            wanted.append(row.end)
        slots = [self.pool.allocate() for _ in wanted]
        row.saves = [
            (position, slot) for position, slot in zip(wanted, slots, strict=True) if slot is not None
        ]
        self._written.update(slot for _, slot in row.saves)

    def _free_saves(self, row: ScheduledRequest) -> None:
        for _, slot in row.saves:
            self._written.remove(slot)
            self.pool.free(slot)

    def apply_saves(self, row: ScheduledRequest, *, valid: bool) -> list[tuple[bytes, bool]]:
        """Keep the states that a finished step saved, and go back to the one after the last accepted draft.
        Free the slots if the row was not `valid`. Returns the hashes of the states kept of the prompt, and
        whether they are at its end.
        """
        kept: list[tuple[bytes, bool]] = []
        if not valid:
            self._free_saves(row)
            return kept
        request, end = row.request, row.request.num_computed
        for position, slot in row.saves:
            self._written.remove(slot)
            if position == end < row.end:  # the drafts from here on were rejected
                self.pool.free(request.state_slot)
                request.state_slot = slot
            elif position <= end and self._is_kept(row, position):
                block_hash = request.block_hashes[position // self._block_size - 1]
                if position > request.num_prompt:
                    self._move_on(request, block_hash)
                is_end = position > request.num_prompt - 1 - self._block_size
                self.pool.keep(slot, block_hash, is_end=is_end)
                if position <= request.num_prompt:
                    kept.append((block_hash, is_end))
            else:
                self.pool.free(slot)
        return kept

    def _is_kept(self, row: ScheduledRequest, position: int) -> bool:
        """Return True if a saved state is for the prefix cache, and its block is full and known there."""
        is_mark = not row.drafts or (self._caching and position % self._stride == 0)
        return is_mark and position // self._block_size <= len(row.request.block_hashes)

    def _move_on(self, request: Request, block_hash: bytes) -> None:
        """Drop the state that was kept earlier in the same answer: the new one takes its place."""
        if request.answer_state is not None and request.answer_state != block_hash:
            self.pool.drop([request.answer_state])
        request.answer_state = block_hash

    def free(self, request: Request, *, suspect: bool) -> None:
        if request.state_slot >= 0:
            self.pool.free(request.state_slot)
            request.state_slot = NO_SLOT
        if suspect:
            self.pool.drop(request.block_hashes)

    def check(self, running: Sequence[Request], loading: Sequence[int] = ()) -> None:
        self.pool.check([*(request.state_slot for request in running), *self._written, *loading])
