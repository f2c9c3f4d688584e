"""Scheduling of draft tokens into steps that have rows to spare.

The time of a linear with few rows is the time to read its weights, so a few more rows cost little. Draft
tokens fill a step up to a fixed number of rows, shared among the decoding requests. Steps with prompts or
with many requests have none. How many tokens a request proposes is decided by its `NgramProposer`.
"""

from dataclasses import replace

from .kv_cache.manager import KVCacheManager
from .ngram_proposer import NgramProposer
from .request import Request
from .step import SampledToken, ScheduledRequest, StepPlan


class DraftScheduler:
    """Add draft tokens to plans and count how many are accepted. Only for executors that finish a step before
    the next one is scheduled.
    """

    def __init__(self, rows: int, kv_cache: KVCacheManager) -> None:
        """`rows`: maximum rows of a step with drafts; 0 turns drafts off."""
        self._rows = rows
        self._kv_cache = kv_cache
        self.drafts = 0
        """Number of drafts (one request, one step) that were verified."""
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def extend(self, plan: StepPlan, running: int) -> None:
        """Add drafts to the plan's decoding rows. `running`: requests that may need one more block each."""
        room, size = self._rows - plan.num_tokens, len(plan.rows)
        if room < size:
            return  # proposing drafts has a cost too
        for place, row in enumerate(plan.rows):
            share = -(-room // (size - place))
            if row.samples and row.num_tokens == 1 and (drafts := self._propose(row.request, share, running)):
                plan.rows[place] = replace(row, num_tokens=1 + len(drafts), drafts=drafts)
                row.request.num_scheduled += len(drafts)
                if self._kv_cache.states is not None:
                    self._kv_cache.states.plan_drafts(plan.rows[place])
                if self._kv_cache.windows is not None:
                    self._kv_cache.windows.cover(row.request, row.start, plan.rows[place].end)
                room -= len(drafts)

    def record_acceptance(self, row: ScheduledRequest, taken: list[SampledToken]) -> None:
        """Record how many drafts of a finished row were accepted. `taken`: tokens that the row gave.

        Resets `num_scheduled` to `num_computed`, because rows of rejected drafts are void.
        """
        drafted = len(row.drafts)
        came_true = [each.token_id == draft for each, draft in zip(taken, row.drafts, strict=False)]
        accepted = sum(came_true)
        row.request.num_scheduled = row.request.num_computed
        assert row.request.drafter is not None
        row.request.drafter.record_verification(drafted, accepted)
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def end(self, request: Request) -> None:
        """Turn drafts off for this request."""
        assert request.drafter is not None
        request.drafter.end()

    def _propose(self, request: Request, most: int, running: int) -> list[int]:
        # A step gives one token more than accepted drafts, and the KV of the last token is never computed.
        most = min(most, request.params.max_tokens - request.num_output - 1)
        if most <= 0:
            return []
        assert request.num_pending == 1
        if request.drafter is None:
            request.drafter = NgramProposer()
        if self._kv_cache.states is not None:
            most = min(most, self._kv_cache.states.pool.num_free)
        drafts = request.drafter.propose(request.token_ids, most) if most else []
        return drafts[: self._slots(request, len(drafts), running)]

    def _slots(self, request: Request, wanted: int, running: int) -> int:
        """Return the number of KV slots for drafts after the request's tokens, at most `wanted`.

        Allocates a block ahead of need only while every running request could still get one: no request is
        preempted for drafts.
        """
        pool = self._kv_cache.pool
        while True:
            free = len(request.block_table) * pool.block_size - request.num_tokens
            if (
                free >= wanted
                or pool.num_available <= running
                or not self._kv_cache.extend(request, alone=False)
            ):
                return min(free, wanted)
