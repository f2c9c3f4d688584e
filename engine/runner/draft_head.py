"""Draft heads at work: they follow the target step by step and propose tokens from its hidden states.

After each step the head is shown the hidden states of the step's rows. Rows of prompts are computed at once,
those of answers when drafts are wanted, at the latest when they fill a block: so the head's keys and values
lie in the blocks of the requests' block tables, in a KV cache of its own, and are copied, cached and kept on
disk with the target's.

Slot i of a block belongs to token i of the target and to token i + 1, which the head reads too. In the last
slot of a block that several requests share this is the token that followed in the first of them: drafts may
be worse by that, tokens are not.

T rows, F numbers of a feature, E hidden.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llmbox.kernels.ops import KVCache

from ..config import DRAFT_MODEL_ROWS
from ..core.request import Request
from ..core.speculation.proposer import DraftMethod, Proposals
from ..core.step import ScheduledRequest, StepResult
from ..device.device import to_device
from ..model.draft_heads import MedusaHeads, RecurringHead
from ..model.forward_context import ForwardContext
from ..model.rotary import Rotary
from ..sampling import Sampler
from .draft_verification import drafting
from .input_batch import begun_blocks, ragged, rope_rows


@dataclass(slots=True)
class FollowedRequest:
    """Progress of a head in a request."""

    admission: int
    """Value of `Request.admissions` that this belongs to."""
    computed: int
    """Position after the last row that the head has computed or passed over."""
    waiting: list[Tensor] = field(default_factory=list)
    """Features of the rows from there on, [rows, F] each."""
    num_waiting: int = 0
    last: tuple[Tensor, Tensor] | None = None
    """Result of the row before `computed`, [1, E] each; None: unknown."""

    @property
    def end(self) -> int:
        return self.computed + self.num_waiting


@dataclass(slots=True)
class HeadRows:
    """Rows of one request for a pass of the head."""

    request: Request
    start: int
    next_ids: Sequence[int]
    """Token after each row."""
    followed: FollowedRequest


class FollowingProposer:
    """Base of proposers that are shown the hidden states of each step."""

    method: DraftMethod

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._followed: WeakKeyDictionary[Request, FollowedRequest] = WeakKeyDictionary()

    def observe(self, rows: Sequence[ScheduledRequest], features_TF: Tensor, result: StepResult) -> None:
        """Take the features of a step's rows, in their order, before `result` is applied to the requests."""
        raise NotImplementedError

    def _start(self, wanted: Sequence[tuple[Request, int]]) -> tuple[dict[Request, Tensor], int]:
        """Return the rows [1, E] that the first drafts are predicted from, where they are known, and the
        number of rows that were computed for them.
        """
        raise NotImplementedError

    def _logits(self, rows_RE: Tensor, depth: int) -> Tensor:
        raise NotImplementedError

    def _advance(self, drafted: Sequence[Request], rows: dict[Request, Tensor]) -> None:
        """Replace the rows of these requests by those after their last draft, which they have got."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Propose at most so many drafts for each request; its block table must have slots for them."""
        drafts: list[list[int]] = [[] for _ in wanted]
        passes = 0
        with drafting(wanted):
            rows, num_rows = self._start(wanted)
            going = [
                (request, most, found)
                for (request, most), found in zip(wanted, drafts, strict=True)
                if request in rows
            ]
            while going:
                if passes:
                    for request, _, found in going:
                        request.token_ids.append(found[-1])
                    self._advance([request for request, _, _ in going], rows)
                    num_rows += len(going)
                logits_RV = self._logits(torch.cat([rows[request] for request, _, _ in going]), passes)
                picks = self._sampler.sample(logits_RV, [request for request, _, _ in going])
                passes += 1
                for (_, _, found), pick in zip(going, picks, strict=True):
                    if not isinstance(pick, str):
                        found.append(pick.token_id)
                going = [each for each in going if passes == len(each[2]) < each[1]]
        return Proposals(drafts, passes, num_rows)

    def _follow(self, row: ScheduledRequest) -> FollowedRequest:
        """Return the state of the row's request; a new one where rows before it were not seen."""
        found = self._followed.get(row.request)
        if found is None or found.admission != row.request.admissions or found.end != row.start:
            found = self._followed[row.request] = FollowedRequest(row.request.admissions, row.start)
        return found


class HeadProposer(FollowingProposer):
    """Proposer of a head that goes on from its own results: MTP, EAGLE-3."""

    def __init__(
        self,
        method: DraftMethod,
        head: RecurringHead,
        rotary: Rotary,
        cache: KVCache,
        sampler: Sampler,
        block_size: int,
    ) -> None:
        """`cache`: with as many blocks as the target's."""
        super().__init__(sampler)
        self.method = method
        self.cache: KVCache = cache
        self._head, self._rotary, self._block_size = head, rotary, block_size

    @torch.inference_mode()
    def observe(self, rows: Sequence[ScheduledRequest], features_TF: Tensor, result: StepResult) -> None:
        ready, first = list[HeadRows](), 0
        for row in rows:
            request, begin = row.request, first
            first += row.num_tokens
            if request.request_id in result.failed:
                self._followed.pop(request, None)
                continue
            taken = [each.token_id for each in result.tokens_of(row)]
            count = row.num_tokens - row.num_rejected(len(taken))
            followed = self._follow(row)
            followed.waiting.append(features_TF[begin : begin + count].clone())
            followed.num_waiting += count
            size, is_prompt = self._block_size, row.start < request.num_prompt
            is_long = is_prompt or count > 1 + len(row.drafts)
            if is_long or followed.end // size > followed.computed // size:
                ready.append(self._rows(request, followed, taken))
        self._compute(ready)

    def _rows(self, request: Request, followed: FollowedRequest, taken: Sequence[int]) -> HeadRows:
        """Return the waiting rows of a request, which will get the tokens `taken`."""
        known = [*request.token_ids[followed.computed + 1 : followed.end + 1], *taken]
        if len(known) < followed.num_waiting:  # nothing follows the last token of a text to embed
            known.append(request.token_ids[-1])
        return HeadRows(request, followed.computed, known, followed)

    def _compute(self, ready: Sequence[HeadRows]) -> int:
        """Compute waiting rows, `DRAFT_MODEL_ROWS` at a time; return their number."""
        for part in _passes(ready):
            features_TF = torch.cat([each.followed.waiting[0][: len(each.next_ids)] for each in part])
            results = self._run(part, self._head.enter(features_TF))
            for each, result in zip(part, results, strict=True):
                followed, count = each.followed, len(each.next_ids)
                followed.last = result
                followed.computed += count
                followed.num_waiting -= count
                followed.waiting = [followed.waiting[0][count:]] if followed.num_waiting else []
        return sum(len(each.next_ids) for each in ready)

    def _run(self, part: Sequence[HeadRows], hidden_TE: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Run one pass; return the results of each request's last row."""
        rows, positions, starts, ids = list[ScheduledRequest](), array("i"), array("i", [0]), array("q")
        for each in part:
            count = len(each.next_ids)
            rows.append(ScheduledRequest(each.request, each.start, count, samples=False))
            positions.extend(range(each.start, each.start + count))
            starts.append(starts[-1] + count)
            ids.extend(each.next_ids)
        ops, device = self._head.ops, hidden_TE.device
        layout = ragged(rows, starts, positions, self._block_size, device)
        ops.clear_blocks(self.cache, begun_blocks(rows, self._block_size))
        forward = ForwardContext(
            to_device(ids, device),
            *rope_rows(self._rotary, rows, layout.positions_T),
            self.cache,
            {None: ops.plan_attention(layout, self.cache, None)},
            layout=layout,
        )
        next_TE, normed_TE = self._head(hidden_TE, forward)
        return [(next_TE[end - 1 : end].clone(), normed_TE[end - 1 : end].clone()) for end in starts[1:]]

    @torch.inference_mode()
    def _start(self, wanted: Sequence[tuple[Request, int]]) -> tuple[dict[Request, Tensor], int]:
        ready, found = list[HeadRows](), list[tuple[Request, FollowedRequest]]()
        for request, _ in wanted:
            followed = self._followed.get(request)
            is_current = followed is not None and followed.admission == request.admissions
            if followed is not None and is_current and followed.end == request.num_tokens - 1:
                found.append((request, followed))
                if followed.num_waiting:
                    ready.append(self._rows(request, followed, ()))
        num_rows = self._compute(ready)
        self._last = {request: followed.last for request, followed in found if followed.last is not None}
        return {request: last[1] for request, last in self._last.items()}, num_rows

    def _logits(self, rows_RE: Tensor, depth: int) -> Tensor:  # noqa: ARG002
        return self._head.logits(rows_RE)

    @torch.inference_mode()
    def _advance(self, drafted: Sequence[Request], rows: dict[Request, Tensor]) -> None:
        """Compute the row before each request's last draft, from the result of the row before."""
        part = [
            HeadRows(request, request.num_tokens - 2, request.token_ids[-1:], self._followed[request])
            for request in drafted
        ]
        hidden_TE = torch.cat([self._last[request][0] for request in drafted])
        for request, last in zip(drafted, self._run(part, hidden_TE), strict=True):
            self._last[request], rows[request] = last, last[1]


class MedusaProposer(FollowingProposer):
    """Proposer of Medusa heads: one head for each draft token, from the target's last hidden state."""

    method: DraftMethod = "medusa"

    def __init__(self, heads: MedusaHeads, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._heads = heads

    def observe(self, rows: Sequence[ScheduledRequest], features_TF: Tensor, result: StepResult) -> None:
        first = 0
        for row in rows:
            request, begin = row.request, first
            first += row.num_tokens
            if row.samples and request.request_id not in result.failed:
                count = row.num_tokens - row.num_rejected(len(result.tokens_of(row)))
                followed = self._followed[request] = FollowedRequest(request.admissions, row.start + count)
                last_1F = features_TF[begin + count - 1 : begin + count].clone()
                followed.last = last_1F, last_1F

    def _start(self, wanted: Sequence[tuple[Request, int]]) -> tuple[dict[Request, Tensor], int]:
        rows = {}
        for request, _ in wanted:
            followed = self._followed.get(request)
            is_current = followed is not None and followed.admission == request.admissions
            if followed is not None and is_current and followed.end == request.num_tokens - 1:
                assert followed.last is not None
                rows[request] = followed.last[1]
        return rows, len(rows)

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        most = len(self._heads.heads)
        return super().propose([(request, min(count, most)) for request, count in wanted])

    @torch.inference_mode()
    def _logits(self, rows_RE: Tensor, depth: int) -> Tensor:
        return self._heads.logits(rows_RE, depth)


def _passes(ready: Sequence[HeadRows]) -> Iterator[list[HeadRows]]:
    """Yield rows for one pass after another. A request's waiting features must be one tensor then."""
    part, room = list[HeadRows](), DRAFT_MODEL_ROWS
    for each in ready:
        followed = each.followed
        followed.waiting = [torch.cat(followed.waiting)]
        start, ids = each.start, each.next_ids
        while len(ids):
            if not room:
                yield part
                part, room = [], DRAFT_MODEL_ROWS
            part.append(HeadRows(each.request, start, ids[:room], followed))
            taken = len(part[-1].next_ids)
            start, ids, room = start + taken, ids[taken:], room - taken
    if part:
        yield part
