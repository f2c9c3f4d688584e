"""Proposers that look drafts up in texts: they cost only the rows that verify them.

N-gram: tokens after a copy of the last n-gram in the request's own text. Answers repeat text: a quoted
passage, the code to change, the names of fields (Saxena, "Prompt Lookup Decoding", 2023).

Suffix: tokens after a copy of the last n-gram in earlier answers to the same caller. Agents and forms get
nearly the same answer again without having it in the prompt (Oliaro et al., "SuffixDecoding: Extreme
Speculative Decoding for Emerging AI Applications", 2024). What one caller's drafts cost never depends on
another's texts.

Grammar: names of fields and signs between values, which are known before the model writes them (jump-forward
decoding of SGLang). They are drafts as others are, because a grammar tells the text alone: the model may
write it in other tokens, or with other spaces.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

from ..request import Request
from .answer_files import AnswerFiles, Caller
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


SIZE: Final = SIZES[0]
"""Length of the n-grams that are looked for in earlier answers."""
RING: Final = 1 << 16
"""Tokens kept of the last answers of one caller: 256 KiB."""
SLOTS: Final = 1 << 17
"""Slots of the hash table: 512 KiB. An n-gram replaces another one with the same slot."""
STORES: Final = 20
"""Callers whose answers are kept, the last ones: 15 MiB in all."""
LONGEST: Final = 8192
"""Tokens kept of one answer, its last ones: about 6 ms to index."""
ASKED: Final = 1024
"""Callers of whom it is known that their file was asked for."""
TAKEN_IN: Final = 1024
"""Tokens from files that are indexed at once, about 1 ms."""
_END: Final = -1


class SuffixStore:
    """Answers of one caller: a ring of the last ones, and a hash table of their n-grams."""

    def __init__(self) -> None:
        self._tokens = array("i", [_END]) * RING
        self._places = array("i", [-1]) * SLOTS
        """Position in the ring after the latest n-gram of each slot."""
        self._next = self._filled = 0

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer."""
        answer = answer[-LONGEST:]
        if len(answer) <= SIZE:
            return
        if self._next + len(answer) + 1 > RING:
            self._tokens[self._next :] = array("i", [_END]) * (RING - self._next)
            self._next = 0
        start = self._next
        self._filled = max(self._filled, start + len(answer) + 1)
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

    def tokens(self) -> "array[int]":
        """Return the kept answers, the oldest first, each with an end."""
        older = self._tokens[self._next : self._filled]
        if older:  # its first answer is written over in part
            del older[: older.index(_END) + 1]
        return older + self._tokens[: self._next]


class SuffixStores:
    """Stores of the callers that were here last."""

    def __init__(self) -> None:
        self.files: AnswerFiles | None = None
        """Files that keep the stores; None: an engine's end loses them."""
        self._stores: OrderedDict[Caller, SuffixStore] = OrderedDict()
        self._asked: OrderedDict[Caller, None] = OrderedDict()
        """Callers whose files were asked for."""
        self._loaded: dict[Caller, array[int]] = {}
        """Answers from files that are not in a store yet."""
        self._lock = threading.Lock()
        """Held while stores change, and while the files' thread copies one."""

    def find(self, tenant: str, namespace: str) -> SuffixStore | None:
        """Return the store of a caller. Where it has none yet, its file is read meanwhile."""
        key = tenant, namespace
        if self.files is not None:
            self._load(self.files, key)
        return self._stores.get(key)

    def add(self, tenant: str, namespace: str, answer: Sequence[int]) -> None:
        """Keep an answer of a caller."""
        if len(answer) <= SIZE:
            return
        key = tenant, namespace
        with self._lock:
            self._store(key).add(answer)
        if self.files is not None:
            self._load(self.files, key)
            self.files.save(key, lambda: self._copy(key))

    def close(self, seconds: float) -> None:
        """Write the rest, for `seconds` at most."""
        if self.files is not None:
            self.files.close(seconds)

    def _store(self, key: Caller) -> SuffixStore:
        """Return the caller's store, and forget the caller that was here longest ago where there are too
        many.
        """
        store = self._stores.setdefault(key, SuffixStore())
        self._stores.move_to_end(key)
        if len(self._stores) > STORES:
            gone, _ = self._stores.popitem(last=False)
            self._asked.pop(gone, None)
        return store

    def _copy(self, key: Caller) -> bytes | None:
        """Return the tokens to write: those of the caller's file that are not in the store yet, and its own.
        Runs in the files' thread.
        """
        with self._lock:
            store = self._stores.get(key)
            if store is None:
                return None
            self._take_loaded()
            tokens = self._loaded.get(key, array("i")) + store.tokens()
        while len(tokens) > RING:
            del tokens[: tokens.index(_END) + 1]
        return tokens.tobytes()

    def _take_loaded(self) -> None:
        while self.files is not None and (loaded := self.files.take_loaded()) is not None:
            self._loaded[loaded[0]] = loaded[1]

    def _load(self, files: AnswerFiles, key: Caller) -> None:
        """Ask for a caller's file once, and take in a part of those that were read."""
        if key not in self._asked:
            self._asked[key] = None
            if len(self._asked) > ASKED:
                self._asked.popitem(last=False)
            files.load(key)
        if not (self._loaded or files.has_loaded):
            return
        with self._lock:
            self._take_loaded()
            caller, tokens = next(iter(self._loaded.items()))
            room = TAKEN_IN
            while tokens and room > 0:
                end = tokens.index(_END) + 1
                self._store(caller).add(tokens[: end - 1])
                del tokens[:end]
                room -= end
            if not tokens:
                del self._loaded[caller]


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


class GrammarProposer:
    """Drafts where a request's grammar leaves no choice but between spaces, and of the end of reasoning that
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
