"""Suffix proposer: draft tokens looked up in earlier answers to the same caller.

Agents and forms get nearly the same answer again without having it in the prompt (Oliaro et al.,
"SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024). What one caller's drafts
cost never depends on another's texts.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from ..request import Request
from .ngram_proposer import match_length
from .proposer import DraftMethod, Proposals

SIZE: Final = 4
"""Length of the n-grams that are looked for in earlier answers."""
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
    """Answers of one caller: a ring of the last ones, and a hash table of their n-grams."""

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

    def follow(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that followed the last n-gram of `tokens` in an answer, and how many
        tokens before them were the same.
        """
        last = tokens[-SIZE:]
        place = self._places[_slot(last)]
        if place < 0 or self._tokens[place - SIZE : place].tolist() != list(last):
            return [], 0
        found = self._tokens[place : place + most].tolist()
        if _END in found:
            del found[found.index(_END) :]
        return found, match_length(tokens, self._tokens, place)


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


class SuffixProposer:
    """Lookups in the answers that each caller has got."""

    method: DraftMethod = "suffix"

    def __init__(self) -> None:
        self.stores = SuffixStores()

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Look up drafts."""
        drafts, matches = list[list[int]](), list[int]()
        for request, most in wanted:
            store = self.stores.find(request.tenant, request.cache_namespace)
            found, match = ([], 0) if store is None else store.follow(request.token_ids, most)
            drafts.append(found)
            matches.append(match)
        return Proposals(drafts, matches=matches)

    def remember(self, request: Request) -> None:
        """Keep the answer of a request that has ended, with the last tokens before it."""
        answer = request.token_ids[max(0, request.num_prompt - SIZE) :]
        self.stores.add(request.tenant, request.cache_namespace, answer)
