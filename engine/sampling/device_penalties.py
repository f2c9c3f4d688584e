"""Penalties, bias and bad words of running requests on the device: a list of entries per row
(`PenaltyState`).

    facts      row -> first entry, how many, ...
    entries    | row 3 ......... | row 0 .... | free | row 7 ....................... |

The host writes a list when a request begins to run. From then on the device counts sampled tokens; the host
only tracks an upper bound of the list's length, and moves it to a larger place in time.

R rows, N entries, S sampling rows of a step; M moved lists, E entries of one of them, L of all.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import Tensor

from llmbox.kernels.sampling_types import COUNTS, FORBIDDEN, FORBIDDEN_EARLY, ONLY_LISTED, PenaltyState

from ..core.request import Request
from ..device.device import Uploader, move

NEVER_SEEN = -1


@dataclass(frozen=True, slots=True)
class PenaltyEntries:
    """List of one row, in the layout of `kernels.sampling_types.PenaltyState`."""

    ids: "array[int]"
    counts: "array[int]"
    flags: "array[int]"
    biases: "array[float]"
    kind: int
    until: int

    def __len__(self) -> int:
        return len(self.ids)


def build_entries(request: Request, vocab_size: int) -> PenaltyEntries:
    """Build the list from the tokens known on the host. Ids outside the vocabulary are dropped."""
    params = request.params
    touched = _counted(request)
    bias = {i: value for i, value in params.logit_bias.items() if 0 <= i < vocab_size}
    words = [word for word in params.bad_words if word and 0 <= word[-1] < vocab_size]
    early = {i for i in params.stop_token_ids if 0 <= i < vocab_size} if params.min_tokens else set()
    forbidden = {word[0] for word in words if len(word) == 1}
    for i in (*bias, *early, *(word[-1] for word in words)):
        touched.setdefault(i, NEVER_SEEN)
    kind = COUNTS if params.penalizes else 0
    if params.allowed_token_ids is not None:
        kind |= ONLY_LISTED
        allowed = (i for i in params.allowed_token_ids if 0 <= i < vocab_size)
        touched = {i: touched.get(i, NEVER_SEEN) for i in allowed}
    return PenaltyEntries(
        ids=array("i", touched),
        counts=array("i", touched.values()),
        flags=array("i", (FORBIDDEN * (i in forbidden) | FORBIDDEN_EARLY * (i in early) for i in touched)),
        biases=array("f", (bias.get(i, 0.0) for i in touched)),
        kind=kind,
        until=request.num_prompt + params.min_tokens,
    )


def _counted(request: Request) -> dict[int, int]:
    """Count output tokens; prompt ids have count 0, only where the repetition penalty needs them."""
    params = request.params
    if not params.penalizes:
        return {}
    counts = dict.fromkeys(request.prompt_ids, 0) if params.repetition_penalty != 1.0 else {}
    counts.update(Counter(request.token_ids[request.num_prompt :]))
    return counts


def match_bad_words(request: Request, vocab_size: int) -> list[tuple[int, int]]:
    """Return (last token, id forbidden after it) of bad words longer than one id that match the known tokens.

    -1: the last token is known on the host and matches.
    """
    tokens, found = request.token_ids, []
    for word in request.params.bad_words:
        if len(word) < 2 or not 0 <= word[-1] < vocab_size:
            continue
        known = word[:-2] if request.num_unknown else word[:-1]
        if word[-2] >= 0 and (not known or tuple(tokens[-len(known) :]) == known):
            found.append((word[-2] if request.num_unknown else -1, word[-1]))
    return found


LEAST: Final = 256
"""Entries of the smallest place, 24 bytes each."""
_FACTS: Final = 5


@dataclass(slots=True)
class _Place:
    start: int
    size: int
    grown: int
    """Upper bound of the list's length, less the position of the token that is drawn."""
    counts: bool


class DevicePenalties:
    """Device lists: `take` and `draws` stage changes, `flush` uploads them."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._facts_R5 = torch.zeros(rows, _FACTS, dtype=torch.int64, device=device)
        self._penalties_R3 = torch.ones(rows, 3, dtype=torch.float32, device=device)
        self._marks_3N = torch.zeros(3, LEAST, dtype=torch.int32, device=device)
        self._values_3N = torch.zeros(3, LEAST, dtype=torch.float32, device=device)
        self._no_words_S1 = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._no_words = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._places: dict[int, _Place] = {}
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self._changes: list[_Write | _Move] = []

    @property
    def entries(self) -> int:
        """Capacity of all lists together."""
        return self._marks_3N.shape[1]

    def take(self, row: int, request: Request) -> None:
        """Stage the list of a row's new request."""
        if (old := self._places.pop(row, None)) is not None:
            self._free.setdefault(old.size, []).append(old.start)
        if not request.edits_logits:
            if old is not None:
                self._changes.append(_Write(row, 0, None, request))
            return
        entries = build_entries(request, self._vocab_size)
        size = _size_for(len(entries) + 1)
        grown = len(entries) + 1 - request.num_tokens
        place = _Place(self._find(size), size, grown, bool(entries.kind & COUNTS))
        self._places[row] = place
        self._changes.append(_Write(row, place.start, entries, request))

    def draws(self, row: int, position: int) -> None:
        """Reserve entries: the row samples tokens up to this position in the staged step, and counts each one
        before it samples the next.
        """
        place = self._places.get(row)
        if place is None or not place.counts:
            return
        if place.grown + position > place.size:
            start, size = place.start, place.size
            place.start, place.size = self._find(2 * size), 2 * size
            self._changes.append(_Move(row, start, place.start, size))
            self._free.setdefault(size, []).append(start)

    def flush(self, uploader: Uploader) -> None:
        changes, self._changes = self._changes, []
        self._make_room()
        for moving, group in groupby(changes, lambda change: isinstance(change, _Move)):
            if moving:
                self._move([change for change in group if isinstance(change, _Move)], uploader)
                continue
            for change in group:
                assert isinstance(change, _Write)
                self._write(change, uploader)

    def of(self, row_S: Tensor, last_R: Tensor, requests: Sequence[Request]) -> PenaltyState | None:
        """Return the state for `Ops.sample`; None where no request has penalties."""
        if not any(request.edits_logits for request in requests):
            return None
        starts_S1, last_W, id_W = self._words(requests)
        return PenaltyState(
            row_S=row_S,
            facts_R5=self._facts_R5,
            penalties_R3=self._penalties_R3,
            last_R=last_R,
            marks_3N=self._marks_3N,
            values_3N=self._values_3N,
            word_starts_S1=starts_S1,
            word_last_W=last_W,
            word_id_W=id_W,
        )

    def _words(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor]:
        starts, pairs = [0], list[tuple[int, int]]()
        for request in requests:
            pairs += match_bad_words(request, self._vocab_size)
            starts.append(len(pairs))
        if not pairs:
            return self._no_words_S1, self._no_words, self._no_words
        device = self._facts_R5.device
        last_W, id_W = (torch.tensor(each) for each in zip(*pairs, strict=True))
        return move(torch.tensor(starts, dtype=torch.int32), device), move(last_W, device), move(id_W, device)

    def _find(self, size: int) -> int:
        """Return the start of a free place."""
        if self._free.get(size):
            return self._free[size].pop()
        start, self._end = self._end, self._end + size
        return start

    def _make_room(self) -> None:
        if self._end > self.entries:
            more = _size_for(self._end) - self.entries
            self._marks_3N, self._values_3N = (
                torch.cat((each, each.new_zeros(3, more)), 1) for each in (self._marks_3N, self._values_3N)
            )

    def _move(self, moves: "list[_Move]", uploader: Uploader) -> None:
        """Move lists to larger places, those of one size by one operation: requests that began together
        outgrow their places in the same step. All are read before any is written, as a new place may overlap
        the old place of another.
        """
        read: list[tuple[Tensor, Tensor, Tensor]] = []
        for size in sorted({each.size for each in moves}):
            alike = [each for each in moves if each.size == size]
            starts = array("q", (each.old for each in alike)), array("q", (each.new for each in alike))
            old_M, new_M = uploader.upload(*starts)
            inside_E = torch.arange(size, device=old_M.device)
            old_L, new_L = ((start_M[:, None] + inside_E).flatten() for start_M in (old_M, new_M))
            read.append((new_L, self._marks_3N[:, old_L], self._values_3N[:, old_L]))
        for new_L, marks_3L, values_3L in read:
            self._marks_3N.index_copy_(1, new_L, marks_3L)
            self._values_3N.index_copy_(1, new_L, values_3L)
        last = {each.row: each.new for each in moves}
        assert len(last) == len(moves)
        row_M, start_M = uploader.upload(array("q", last), array("q", last.values()))
        self._facts_R5[:, 0].index_copy_(0, row_M, start_M)

    def _write(self, change: "_Write", uploader: Uploader) -> None:
        if change.entries is None:
            self._facts_R5[change.row].zero_()
            return
        entries, params = change.entries, change.request.params
        facts = array("q", [change.start, len(entries), change.known, entries.until, entries.kind])
        penalties = array("f", [params.repetition_penalty, params.frequency_penalty, params.presence_penalty])
        marks = entries.ids + entries.counts + entries.flags
        facts_5, penalties_3, marks_3n, bias_n = uploader.upload(facts, penalties, marks, entries.biases)
        place = slice(change.start, change.start + len(entries))
        self._facts_R5[change.row] = facts_5
        self._penalties_R3[change.row] = penalties_3
        self._marks_3N[:, place] = marks_3n.view(3, -1)
        self._values_3N[0, place] = bias_n


class _Write:
    """Staged write of a list, or of its removal."""

    def __init__(self, row: int, start: int, entries: PenaltyEntries | None, request: Request) -> None:
        self.row, self.start, self.entries, self.request = row, start, entries, request
        self.known = request.num_tokens
        """Number of tokens counted in the list."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Staged move of a row's list to a larger place."""

    row: int
    old: int
    new: int
    size: int


def _size_for(entries: int) -> int:
    return max(LEAST, 1 << (entries - 1).bit_length())
