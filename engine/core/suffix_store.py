"""Suffix store: answers of earlier requests, in which n-gram proposers look for what follows.

Agents and forms ask for nearly the same text again (the same call, the same file with one change) without
having it in the prompt (Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI
Applications", 2024). Here is a ring of the last answers and a hash table of their n-grams, both of fixed
size, for each caller and cache namespace: what one caller's drafts cost never depends on another's texts.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

SIZE: Final = 4
"""Length of the n-grams."""
RING: Final = 1 << 16
"""Tokens kept of the last answers of one caller: 256 KiB."""
SLOTS: Final = 1 << 17
"""Slots of the hash table: 512 KiB. An n-gram replaces another one with the same slot."""
STORES: Final = 20
"""Callers whose answers are kept, the last ones: 15 MiB in all."""
LONGEST: Final = 8192
"""Tokens kept of one answer, its last ones: about 6 ms to index."""
_END: Final = -1


class SuffixStore:
    """Answers of one caller."""

    def __init__(self) -> None:
        self._tokens = array("i", [_END]) * RING
        self._places = array("i", [-1]) * SLOTS
        """Position in the ring after the latest n-gram of each slot."""
        self._next = 0

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer."""
        answer = answer[-LONGEST:]
        if len(answer) <= SIZE:
            return
        if self._next + len(answer) + 1 > RING:
            self._tokens[self._next :] = array("i", [_END]) * (RING - self._next)
            self._next = 0
        start = self._next
        self._tokens[start : start + len(answer) + 1] = array("i", [*answer, _END])
        for end in range(SIZE, len(answer)):
            self._places[_slot(answer[end - SIZE : end])] = start + end
        self._next = start + len(answer) + 1

    def follow(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the last n-gram of `tokens` in an answer."""
        last = tokens[-SIZE:]
        place = self._places[_slot(last)]
        if place < 0 or self._tokens[place - SIZE : place].tolist() != list(last):
            return []
        found = self._tokens[place : place + most].tolist()
        return found[: found.index(_END)] if _END in found else found


class SuffixStores:
    """Stores of the callers that were here last."""

    def __init__(self) -> None:
        self._stores: OrderedDict[tuple[str, str], SuffixStore] = OrderedDict()

    def find(self, tenant: str, namespace: str) -> SuffixStore | None:
        return self._stores.get((tenant, namespace))

    def add(self, tenant: str, namespace: str, answer: Sequence[int]) -> None:
        """Keep an answer of a caller, and forget the caller that was here longest ago where there are too
        many.
        """
        if len(answer) <= SIZE:
            return
        key = tenant, namespace
        store = self._stores.setdefault(key, SuffixStore())
        self._stores.move_to_end(key)
        if len(self._stores) > STORES:
            self._stores.popitem(last=False)
        store.add(answer)


def _slot(ngram: Sequence[int]) -> int:
    return hash(tuple(ngram)) % SLOTS
