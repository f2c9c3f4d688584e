"""Guesses at what a request says next, looked up in its own tokens: what stood after the same words before.

Answers repeat: a quoted passage, the code to change, the names of fields (Saxena, "Prompt Lookup Decoding",
2023). A guess costs nothing but the rows that verify it (`draft_verification.py`), and these are few where
guesses fail.
"""

from collections.abc import Sequence
from typing import Final

SIZES: Final = (4, 2)
"""Tokens that must have stood together before: four, or two, which speak for one token and no more."""
AT_ONCE: Final = 4096
"""Tokens that are indexed in one call, some 3 ms: a long prompt takes several steps."""
FIRST: Final = 3
"""Drafts of a request that has not shown yet whether it repeats."""
MOST: Final = 15
REST: Final = 4
"""Tokens without drafts after a failure."""
LONGEST_REST: Final = 64


class SuffixIndex:
    """Where the last few tokens of a growing sequence stood before, the latest place.

    Constant work a token, however long the sequence is; some 400 bytes of memory.
    """

    def __init__(self) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in SIZES}
        """By size and tokens: the position after their last place but the sequence's end."""
        self._next = 1
        """The first position that no entry leads to yet."""

    def catch_up(self, tokens: Sequence[int]) -> bool:
        """Take in tokens since the last call; False while some are left for the next ones."""
        start, end = self._next, min(len(tokens), self._next + AT_ONCE)
        for size, after in self._after.items():
            for place in range(max(start, size), end):
                after[tuple(tokens[place - size : place])] = place
        self._next = max(start, end)
        return end == len(tokens)

    def follow(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that followed the same ending before; where they run into the end, the
        repetition goes on.
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
    """Drafts of one request, as many as its last ones earned.

    All came true: twice as many. Some: one more than did. None: a few again, after a rest that doubles with
    each failure in a row. So a request that never repeats pays for few rows: 5 in its first 100 tokens and 1
    in 65 from then on, where two tokens stood together before, three times as many where four did.
    """

    def __init__(self) -> None:
        self._index = SuffixIndex()
        self._length = FIRST
        self._failures = 0
        self._rest = 0
        self._ended = False

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens after these, none where nothing speaks for any."""
        if self._ended:
            return []
        if self._rest > 0:
            self._rest -= 1
            return []
        if not self._index.catch_up(tokens):
            return []
        return self._index.follow(tokens, min(most, self._length))

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of the last proposal were tried, and came true."""
        if accepted == 0:
            self._rest = min(REST << self._failures, LONGEST_REST)
            self._failures += 1
            self._length = FIRST
            return
        if 2 * accepted >= drafted:
            self._failures = 0
        self._length = accepted + 1 if accepted < drafted else max(self._length, min(2 * drafted, MOST))

    def end(self) -> None:
        """No drafts any more."""
        self._ended = True
