"""Slots of recurrent state: one for each running sequence, and those that the prefix cache keeps.

A slot is always in exactly one of three states:

    free      no content worth keeping
    kept      holds the state after a known prefix; taken last, least recently used first, where one at the
              end of a prompt or an answer is passed over once
    used      of a running sequence, or being written by a launched step
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class StatePool:
    """Allocates slots and takes them back. Kept states are found by the chain hash of their last block."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._passed_over: set[bytes] = set()
        """Kept states that `allocate` does not evict when it meets them first."""
        self.evictions = 0
        """Number of kept states that `allocate` evicted."""

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
                return self._kept.pop(oldest)
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

        `is_end`: it is the end of a prompt or an answer, where the next turn goes on.
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
