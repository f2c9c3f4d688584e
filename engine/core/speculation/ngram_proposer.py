"""N-gram proposer: draft tokens looked up in a request's own tokens, after an earlier copy of its last
n-gram, and in earlier answers to the same caller.

Answers repeat text: a quoted passage, the code to change, the names of fields (Saxena, "Prompt Lookup
Decoding", 2023). A draft costs only the rows that verify it (`runner/draft_verification.py`), and a request
whose drafts are rejected gets few of them. Agents and forms get nearly the same answer again without having
it in the prompt (Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications",
2024). What one caller's drafts cost never depends on another's texts.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

SIZES: Final = (4, 2)
"""N-gram lengths to match, in order. A match of two tokens proposes one token at most."""
AT_ONCE: Final = 4096
"""Maximum tokens indexed per call, about 3 ms: a long prompt is indexed over several steps."""
FIRST: Final = 3
"""Draft length of a request before its first verification, and after a failure."""
MOST: Final = 15
"""Maximum draft length."""
REST: Final = 4
"""Tokens without drafts after the first failure; doubled with each failure in a row."""
LONGEST_REST: Final = 64
"""Maximum tokens without drafts after a failure."""


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
_SUFFIX_END: Final = -1


class SuffixIndex:
    """Index of the latest earlier position of each n-gram of a growing sequence.

    Takes constant time and about 400 bytes per token, whatever the length of the sequence.
    """

    def __init__(self) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in SIZES}
        """Position after the latest occurrence of an n-gram that is not at the end, by length and tokens."""
        self._next = 1
        """First position that no entry points to yet."""

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Index the tokens added since the last call; False if some are left for the next call."""
        start, end = self._next, min(len(tokens), self._next + AT_ONCE)
        for size, after in self._after.items():
            for place in range(max(start, size), end):
                after[tuple(tokens[place - size : place])] = place
        self._next = max(start, end)
        return end == len(tokens)

    def follow(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that followed the same ending before. Where the copy reaches the end of
        the sequence, it continues with its own tokens.
        """
        for size, after in self._after.items():
            place = after.get(tuple(tokens[-size:]))
            if place is not None:
                wanted = most if size == SIZES[0] else min(most, 1)
                found = list(tokens[place : place + wanted])
                while len(found) < wanted:
                    found.append(found[place - len(tokens)])
                return found
        return []


class SuffixStore:
    """Answers of one caller: a ring of the last ones, and a hash table of their n-grams."""

    def __init__(self) -> None:
        self._tokens = array("i", [_SUFFIX_END]) * RING
        self._places = array("i", [-1]) * SLOTS
        """Position in the ring after the latest n-gram of each slot."""
        self._next = 0

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer."""
        answer = answer[-LONGEST:]
        if len(answer) <= SIZE:
            return
        if self._next + len(answer) + 1 > RING:
            self._tokens[self._next :] = array("i", [_SUFFIX_END]) * (RING - self._next)
            self._next = 0
        start = self._next
        self._tokens[start : start + len(answer) + 1] = array("i", [*answer, _SUFFIX_END])
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
        return found[: found.index(_SUFFIX_END)] if _SUFFIX_END in found else found


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


class NgramProposer:
    """Draft tokens of one request, with a length that adapts to acceptance.

    All accepted: the next draft is twice as long. Some accepted: one token longer than the accepted part.
    None: `FIRST` again, after a rest that doubles with each failure in a row. A request that never repeats
    therefore pays for few rows: with matches of two tokens 5 rows in its first 100 tokens and 1 in 65 from
    then on, with matches of four tokens three times as many.
    """

    def __init__(self, earlier: SuffixStore | None = None) -> None:
        """`earlier`: answers of the same caller, where its own tokens have no match of the longest n-gram."""
        self._index = SuffixIndex()
        self._earlier = earlier
        self._length = FIRST
        self._failures = 0
        self._rest = 0
        self._ended = False

    @property
    def has_ended(self) -> bool:
        return self._ended

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` draft tokens to follow `tokens`; empty without a match or during a rest."""
        if self._ended:
            return []
        if self._rest > 0:
            self._rest -= 1
            return []
        if not self._index.catch_up(tokens):
            return []
        most = min(most, self._length)
        found = self._index.follow(tokens, most)
        if len(found) < min(most, 2) and self._earlier is not None:
            return self._earlier.follow(tokens, most) or found
        return found

    def record_verification(self, drafted: int, accepted: int) -> None:
        """Adapt the length and the rest to the verification of the last draft: `accepted` of `drafted`."""
        if accepted == 0:
            self._rest = min(REST << self._failures, LONGEST_REST)
            self._failures += 1
            self._length = FIRST
            return
        if 2 * accepted >= drafted:
            self._failures = 0
        self._length = accepted + 1 if accepted < drafted else max(self._length, min(2 * drafted, MOST))

    def end(self) -> None:
        """Stop proposing for good."""
        self._ended = True
