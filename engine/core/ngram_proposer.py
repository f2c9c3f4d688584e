"""N-gram proposer: draft tokens looked up in a request's own tokens, after an earlier copy of its last
n-gram.

Answers repeat text: a quoted passage, the code to change, the names of fields (Saxena, "Prompt Lookup
Decoding", 2023). A draft costs only the rows that verify it (`runner/draft_verification.py`), and a request
whose drafts are rejected gets few of them.
"""

from collections.abc import Sequence
from typing import Final

from .suffix_store import SuffixStore

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
