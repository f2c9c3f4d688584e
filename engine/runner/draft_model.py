"""Draft model: a smaller model with the same vocabulary, whose tokens the target model verifies.

Its keys and values lie in a separate KV cache, in the blocks of the requests' block tables: block b of the
target has room for the same tokens in block b here. A request's draft KV is computed when drafts are wanted,
so that a request that never has any costs nothing. What the cache holds of a block is known by the chain hash
of its tokens.

A draft token is sampled as the target samples: same noise of (seed, position), same logits processors. So a
draft model whose logits are close proposes the target's token in sampled answers too. A grammar's mask after
each draft comes from a copy of its state.

On a GPU the passes are launched on the stream of the target's steps, each before the host knows the token of
the one before, which stays on the device:

    host     launch 1 | launch 2 | read 1 | launch 3 | read 2 | read 3 | launch the verification
    device            |- pass 1 -|-- pass 2 --|-- pass 3 --|

Where one of the requests has a grammar, each pass waits for the tokens of the one before.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from ..config import DRAFT_MODEL_ROWS
from ..core.request import Request
from ..core.speculation.proposer import DraftMethod, Proposals
from ..core.step import Executor, SampledToken, ScheduledRequest, StepPlan, SyncExecutor
from ..sampling import Sampler
from ..sampling.logits_processors import pad_vocabulary
from .draft_verification import drafting


class DraftSampler(Sampler):
    """Sampler over the vocabulary of the target, for drafts that may be taken back."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finds_best = False  # the model may have ids that the target has not

    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[SampledToken | str]:
        """Return one result per row. Ids that only the target has are never proposed."""
        self._rules.clear()  # counts of a penalty include drafts that were rejected since
        return super().sample(pad_vocabulary(logits_RV, self._vocab_size), requests)


class DraftExecutor(Executor, Protocol):
    """Executor of a draft model."""

    def take_back(self, requests: Sequence[Request]) -> None:
        """Undo the sampling of tokens for these requests: they were drafts."""
        ...


class SyncDraftExecutor(SyncExecutor):
    """Executor of a draft model on a CPU, whose runner reads all tokens from the requests."""

    def take_back(self, requests: Sequence[Request]) -> None:
        """Do nothing: no token is stored elsewhere."""


@dataclass(slots=True)
class DraftProgress:
    """Tokens of a request whose keys and values are in the draft model's cache."""

    admission: int
    """Value of `Request.admissions` that `ids` belong to."""
    ids: list[int]
    """These tokens: the first of the request, and drafts after them, which may have been rejected."""
    confirmed: int = 0
    """Number of them that the request was seen to have."""
    named: int = 0
    """Number of blocks whose hashes are noted."""


@dataclass(slots=True)
class DraftedRequest:
    """Request that gets drafts."""

    known: int
    """Number of its tokens."""
    most: int
    drafts: list[int] = field(default_factory=list)
    has_ended: bool = False
    """A pass gave no token for it, or the answer's last one."""


class ModelProposer(ABC):
    """Base of proposers that run a model: the passes of a draft, over its executor."""

    method: DraftMethod

    def __init__(self, executor: DraftExecutor) -> None:
        """`executor`: of the model. It samples ids of the target, may launch a pass ahead of the host's
        tokens, and has as many blocks as the target.
        """
        self.executor = executor

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Propose drafts for each request, at most as many as it is paired with; its block table must have
        slots for them.
        """
        going = {request: DraftedRequest(request.num_tokens, most) for request, most in wanted}
        executor, passes, num_rows = self.executor, 0, 0
        launched = deque[tuple[list[ScheduledRequest], Any]]()
        with drafting(wanted) as is_limited:
            ahead = 0 if is_limited else executor.depth  # a mask follows the token before
            executor.take_back(list(going))
            rows = self._catch_up(wanted)
            while rows or launched:
                if rows:
                    passes, num_rows = passes + 1, num_rows + sum(row.num_tokens for row in rows)
                    launched.append((rows, executor.launch(StepPlan(rows=rows))))
                if len(launched) > ahead or not rows:
                    self._collect(*launched.popleft(), going)
                rows = self._next_rows(rows, going)
        return Proposals([each.drafts for each in going.values()], passes, num_rows)

    def prepare(self) -> bool:
        """Do one piece of idle-time work that makes later passes faster; False when nothing is left."""
        return self.executor.prepare()

    @abstractmethod
    def _catch_up(self, wanted: Sequence[tuple[Request, int]]) -> list[ScheduledRequest]:
        """Return the rows of the first pass. Those that reach a request's last token give its first draft."""

    def _row(self, request: Request, start: int, count: int, *, samples: bool) -> ScheduledRequest:
        return ScheduledRequest(request, start, count, samples, request.admissions)

    @abstractmethod
    def _note_computed(self, row: ScheduledRequest, known: int) -> None:
        """Note that a row is computed. `known`: tokens of its request without drafts."""

    def _next_rows(
        self, rows: Sequence[ScheduledRequest], going: Mapping[Request, DraftedRequest]
    ) -> list[ScheduledRequest]:
        """Return a row of each request for which these ones sample a draft and that may have one more."""
        following = []
        for row in rows:
            request, drafted = row.request, going[row.request]
            if row.samples and row.end + 1 < drafted.known + drafted.most and not drafted.has_ended:
                request.num_pending += 1
                following.append(self._row(request, row.end, 1, samples=True))
        return following

    def _collect(
        self, rows: Sequence[ScheduledRequest], handle: Any, going: Mapping[Request, DraftedRequest]
    ) -> None:
        """Take the tokens of a launched pass."""
        result = self.executor.collect(handle)
        for row in rows:
            request, drafted = row.request, going[row.request]
            if drafted.has_ended:  # this pass was launched before that was known
                continue
            self._note_computed(row, drafted.known)
            token = result.tokens.get(request.request_id)
            if token is not None:
                drafted.drafts.append(token.token_id)
                request.append([token.token_id])
                if (constraint := request.constraint) is not None and constraint.has_grammar:
                    request.update_mask()
                    drafted.has_ended = constraint.problem is not None
            elif row.samples:
                drafted.has_ended = True


class DraftModel(ModelProposer):
    """Proposes tokens of a whole batch. Owns the draft model's KV cache by its executor.

    A request whose tokens take more than `DRAFT_MODEL_ROWS` rows to catch up gets no drafts, and is closer by
    as many tokens next time.
    """

    method: DraftMethod = "draft_model"

    def __init__(self, executor: DraftExecutor, num_blocks: int, block_size: int) -> None:
        super().__init__(executor)
        self._block_size = block_size
        self._held: list[bytes | None] = [None] * num_blocks
        """Chain hash of the tokens whose KV each block holds; None: unknown."""
        self._progress: WeakKeyDictionary[Request, DraftProgress] = WeakKeyDictionary()

    def _catch_up(self, wanted: Sequence[tuple[Request, int]]) -> list[ScheduledRequest]:
        """Return rows of the tokens without draft KV, up to the limit of one pass."""
        rows, room = list[ScheduledRequest](), DRAFT_MODEL_ROWS
        for request, _ in wanted:
            progress = self._valid_progress(request)
            start, size = len(progress.ids), request.num_tokens
            count = min(size - start, room)
            if count > 0:
                room -= count
                rows.append(self._row(request, start, count, samples=start + count == size))
        return rows

    def _valid_progress(self, request: Request) -> DraftProgress:
        """Return the request's progress, without drafts that were rejected and without its last token, whose
        row gives the first draft.
        """
        progress = self._progress.get(request)
        if progress is None or progress.admission != request.admissions:
            progress = DraftProgress(request.admissions, request.token_ids[: self._known(request)])
            progress.confirmed = len(progress.ids)
            progress.named = progress.confirmed // self._block_size
            self._progress[request] = progress
        known = request.token_ids
        count = min(len(progress.ids), len(known) - 1)
        first = min(progress.confirmed, count)
        same = next((i for i in range(first, count) if progress.ids[i] != known[i]), count)
        del progress.ids[same:]
        progress.confirmed, progress.named = same, min(progress.named, same // self._block_size)
        self._note_blocks(progress, request)
        return progress

    def _known(self, request: Request) -> int:
        """Return how many of its first tokens have draft KV, computed by other requests."""
        blocks = zip(request.block_table, request.block_hashes, strict=False)
        count = 0
        for block, block_hash in blocks:
            if self._held[block] != block_hash:
                break
            count += self._block_size
        return count

    def _note_blocks(self, progress: DraftProgress, request: Request) -> None:
        """Note the hashes of blocks that have become full of known tokens."""
        end = min(len(progress.ids) // self._block_size, len(request.block_hashes))
        for place in range(progress.named, end):
            self._held[request.block_table[place]] = request.block_hashes[place]
        progress.named = max(progress.named, end)

    def _row(self, request: Request, start: int, count: int, *, samples: bool) -> ScheduledRequest:
        """Return a row of a pass, which overwrites the KV of its tokens."""
        for place in range(start // self._block_size, -(-(start + count) // self._block_size)):
            self._held[request.block_table[place]] = None
        return super()._row(request, start, count, samples=samples)

    def _note_computed(self, row: ScheduledRequest, known: int) -> None:
        progress = self._progress[row.request]
        progress.ids += row.request.token_ids[row.start : row.end]
        if row.end <= known:
            progress.confirmed = len(progress.ids)
            self._note_blocks(progress, row.request)
