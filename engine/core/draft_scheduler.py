"""Puts drafts into steps that have room for their rows.

A linear of few rows takes as long as reading its weights: rows up to that cost little. So drafts fill a step
up to a fixed number of rows, shared among the requests that decode, and steps with prompts or many requests
have none. What a request gets of it is its `NgramProposer`'s business.
"""

from dataclasses import replace

from .kv_cache.manager import KVCacheManager
from .ngram_proposer import NgramProposer
from .request import Request
from .step import SampledToken, ScheduledRequest, StepPlan


class DraftScheduler:
    """Of one scheduler, where a step is done before the next is scheduled."""

    def __init__(self, rows: int, tables: KVCacheManager) -> None:
        """`rows`: of a step with drafts, at most. 0: there are none."""
        self._rows = rows
        self._tables = tables
        self.drafts = 0
        """Times that a request's drafts were verified."""
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def extend(self, plan: StepPlan, running: int) -> None:
        """Drafts for the plan's decoding requests. `running`: requests that may need a block each."""
        room, size = self._rows - plan.num_tokens, len(plan.rows)
        if room < size:
            return  # looking for drafts costs something too
        for place, row in enumerate(plan.rows):
            share = -(-room // (size - place))
            if row.samples and row.num_tokens == 1 and (drafts := self._propose(row.request, share, running)):
                plan.rows[place] = replace(row, num_tokens=1 + len(drafts), drafts=drafts)
                row.request.num_scheduled += len(drafts)
                room -= len(drafts)

    def settle(self, row: ScheduledRequest, taken: list[SampledToken]) -> None:
        """The step is done and the request has these tokens of it: what was computed beyond is void."""
        drafted = len(row.drafts)
        came_true = [each.token_id == draft for each, draft in zip(taken, row.drafts, strict=False)]
        accepted = sum(came_true)
        row.request.num_scheduled = row.request.num_computed
        assert row.request.drafter is not None
        row.request.drafter.learn(drafted, accepted)
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted

    def end(self, request: Request) -> None:
        """No drafts for this one any more."""
        assert request.drafter is not None
        request.drafter.end()

    def _propose(self, request: Request, most: int, running: int) -> list[int]:
        # Each step gives one token more than drafts that came true; the last token is never computed.
        most = min(most, request.params.max_tokens - request.num_output - 1)
        if most <= 0:
            return []
        assert request.num_pending == 1
        if request.drafter is None:
            request.drafter = NgramProposer()
        drafts = request.drafter.propose(request.token_ids, most)
        return drafts[: self._slots(request, len(drafts), running)]

    def _slots(self, request: Request, wanted: int, running: int) -> int:
        """For the tokens after the last. A block that they need early is taken only where every running
        request could have one as well: nobody is preempted for drafts.
        """
        pool = self._tables.pool
        while True:
            free = len(request.block_table) * pool.block_size - request.num_tokens
            if free >= wanted or pool.num_available <= running or not self._tables.grow(request, alone=False):
                return min(free, wanted)
