"""Proposers that read a request's own text: drafts cost only the rows that verify them.

N-gram: tokens after a copy of the last n-gram. Answers repeat text: a quoted passage, the code to change, the
names of fields (Saxena, "Prompt Lookup Decoding", 2023).

Grammar: names of fields and signs between values, which are known before the model writes them (jump-forward
decoding of SGLang). They are drafts as others are, because a grammar tells the text alone: the model may
write it in other tokens, or with other spaces.
"""

from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

from ..request import Request
from .proposer import DraftMethod, Proposals

SIZES: Final = (4, 2)
"""N-gram lengths to match, in order. A match of two tokens proposes one token at most."""
LONGER: Final = (16, 8)
"""Lengths of a longer match that are told apart."""
AT_ONCE: Final = 4096
"""Maximum tokens indexed per call, about 3 ms: a long prompt is indexed over several steps."""


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

    def follow(self, tokens: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return up to `most` tokens that followed the same ending before, and how long this ending is. Where
        the copy reaches the end of the sequence, it continues with its own tokens.
        """
        for size, after in self._after.items():
            place = after.get(tuple(tokens[-size:]))
            if place is not None:
                wanted = most if size == SIZES[0] else min(most, 1)
                found = list(tokens[place : place + wanted])
                while len(found) < wanted:
                    found.append(found[place - len(tokens)])
                return found, size if size < SIZES[0] else match_length(tokens, tokens, place)
        return [], 0


def match_length(tokens: Sequence[int], text: Sequence[int], place: int) -> int:
    """Return how many tokens before `place` of `text` are the last ones of `tokens`, where those of the
    longest n-gram are: its length, or one of `LONGER`.
    """
    for size in LONGER:
        if place >= size and list(text[place - size : place]) == list(tokens[-size:]):
            return size
    return SIZES[0]


class NgramProposer:
    """Lookups in the tokens of each request."""

    method: DraftMethod = "ngram"

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Request, SuffixIndex] = WeakKeyDictionary()

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Look up drafts; none for a request whose prompt is not indexed yet."""
        drafts, matches = list[list[int]](), list[int]()
        for request, most in wanted:
            index = self._indexes.get(request)
            if index is None:
                index = self._indexes[request] = SuffixIndex()
            tokens = request.token_ids
            found, match = index.follow(tokens, most) if index.catch_up(tokens) else ([], 0)
            drafts.append(found)
            matches.append(match)
        return Proposals(drafts, matches=matches)


class GrammarProposer:
    """Guesses where a request's grammar leaves no choice but between spaces, and of the end of thoughts that
    are over their budget.
    """

    method: DraftMethod = "grammar"

    def __init__(self) -> None:
        self._guesses: WeakKeyDictionary[Request, tuple[int, list[int]]] = WeakKeyDictionary()
        """Last guess of each request, and how many tokens came before it."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Guess drafts of requests with constraints."""
        drafts = [self._guess(request, most) for request, most in wanted]
        return Proposals(drafts, matches=[LONGER[0] if found else 0 for found in drafts])

    def _guess(self, request: Request, most: int) -> list[int]:
        tokens, (place, guess) = request.token_ids, self._guesses.get(request, (0, []))
        passed = len(tokens) - place
        # Where no row was free for all of it, the rest is still right.
        if 0 <= passed < len(guess) and guess[:passed] == tokens[place:]:
            return guess[passed : passed + most]
        if request.constraint is None:
            return []
        found = request.constraint.guess(tokens, most)
        self._guesses[request] = len(tokens), found
        return found
