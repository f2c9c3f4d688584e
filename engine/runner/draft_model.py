"""Draft model: a smaller model with the same vocabulary, whose tokens the target model verifies.

Its keys and values lie in a KV cache of its own, in the blocks of the requests' block tables: block b of the
target has room for the same tokens in block b here. A request's draft KV is computed when drafts are wanted,
so that a request that never has any costs nothing. What the cache holds of a block is known by the chain hash
of its tokens.

A draft token is sampled as the target samples: same noise of (seed, position), same logits processors. So a
draft model whose logits are close proposes the target's token in sampled answers too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn.functional import pad

from ..config import DRAFT_MODEL_ROWS
from ..core.request import Request
from ..core.speculation.proposer import DraftMethod, Proposals
from ..core.step import SampledToken, ScheduledRequest, StepPlan
from ..sampling import Sampler
from ..sampling.logits_processors import FORBIDDEN
from .cpu_runner import CPUModelRunner
from .draft_verification import drafting


class DraftSampler(Sampler):
    """Sampler over the vocabulary of the target, for drafts that may be taken back."""

    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[SampledToken | str]:
        """Return one result per row. Ids that only the target has are never proposed."""
        self._rules.clear()  # counts of a penalty include drafts that were rejected since
        missing = self._vocab_size - logits_RV.shape[1]
        if missing > 0:
            logits_RV = pad(logits_RV, (0, missing), value=FORBIDDEN)
        return super().sample(logits_RV, requests)


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


class DraftModel:
    """Proposes tokens of a whole batch. Owns the draft model's KV cache by its runner."""

    method: DraftMethod = "draft_model"

    def __init__(self, runner: CPUModelRunner, num_blocks: int, block_size: int) -> None:
        """`runner`: of the draft model, with a `DraftSampler` and as many blocks as the target has."""
        self._runner = runner
        self._block_size = block_size
        self._held: list[bytes | None] = [None] * num_blocks
        """Chain hash of the tokens whose KV each block holds; None: unknown."""
        self._progress: WeakKeyDictionary[Request, DraftProgress] = WeakKeyDictionary()

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> Proposals:
        """Propose at most so many drafts for each request; its block table must have slots for them.

        A request whose tokens take more than `DRAFT_MODEL_ROWS` rows to catch up gets none, and is closer by
        as many tokens next time.
        """
        drafts: list[list[int]] = [[] for _ in wanted]
        with drafting(wanted) as sizes:
            rows, passes, num_rows = self._catch_up(wanted), 0, 0
            while rows:
                passes, num_rows = passes + 1, num_rows + sum(row.num_tokens for row in rows)
                self._sample(rows, wanted, drafts)
                if passes == 1:
                    self._confirm(rows)
                rows = self._next_rows(wanted, drafts, sizes)
        return Proposals(drafts, passes, num_rows)

    def _catch_up(self, wanted: Sequence[tuple[Request, int]]) -> list[ScheduledRequest]:
        """Return rows of the tokens without draft KV, up to the limit of one pass."""
        rows, room = list[ScheduledRequest](), DRAFT_MODEL_ROWS
        for request, _ in wanted:
            progress = self._valid_progress(request)
            start, size = len(progress.ids), request.num_tokens
            count = min(size - start, room)
            if count > 0:
                room -= count
                rows.append(ScheduledRequest(request, start, count, samples=start + count == size))
                self._write(progress, request, start, start + count)
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

    def _confirm(self, rows: Sequence[ScheduledRequest]) -> None:
        """Record that the pass of known tokens is done."""
        for row in rows:
            progress = self._progress[row.request]
            progress.confirmed = len(progress.ids)
            self._note_blocks(progress, row.request)

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

    def _write(self, progress: DraftProgress, request: Request, start: int, end: int) -> None:
        """Record that a pass writes the KV of tokens `start` to `end`."""
        for place in range(start // self._block_size, -(-end // self._block_size)):
            self._held[request.block_table[place]] = None
        progress.ids += request.token_ids[start:end]

    def _next_rows(
        self, wanted: Sequence[tuple[Request, int]], drafts: Sequence[list[int]], sizes: Sequence[int]
    ) -> list[ScheduledRequest]:
        """Return a row of each request whose last pass gave a draft and that may have one more."""
        rows = []
        for (request, most), found, size in zip(wanted, drafts, sizes, strict=True):
            if request.num_tokens == size + len(found) - 1 and len(found) < most:
                request.token_ids.append(found[-1])
                end = request.num_tokens
                rows.append(ScheduledRequest(request, end - 1, 1, samples=True))
                self._write(self._progress[request], request, end - 1, end)
        return rows

    def _sample(
        self,
        rows: list[ScheduledRequest],
        wanted: Sequence[tuple[Request, int]],
        drafts: Sequence[list[int]],
    ) -> None:
        result = self._runner.execute(StepPlan(rows=rows))
        for (request, _), found in zip(wanted, drafts, strict=True):
            token = result.tokens.get(request.request_id)
            if token is not None:
                found.append(token.token_id)
