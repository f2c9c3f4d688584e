"""Scheduling of draft tokens into steps that have rows to spare.

The time of a linear with few rows is the time to read its weights, so a few more rows cost little. Draft
tokens fill a step up to a fixed number of rows, shared among the decoding requests. Steps with prompts or
with many requests have none. Proposers are asked in this order:

    n-grams    `NgramProposer` of each request: tokens that followed the same ones before
    models     `Proposer` for those left, where it has paid so far (`draft_length.py`)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..kv_cache.manager import KVCacheManager
from ..request import Request
from ..step import SampledToken, ScheduledRequest, StepPlan
from .draft_length import DraftLength
from .ngram_proposer import SIZE, NgramProposer, SuffixStores
from .proposer import DraftMethod, Proposer

MIN_NGRAM_DRAFTS = 2
"""Fewest tokens that n-grams must propose where a draft model could propose instead."""
CAUGHT_UP_ROWS = 2
"""Most rows of a request in a pass whose time tells what a draft costs."""


class AcceptanceCounts:
    """Drafts of one method that were verified."""

    def __init__(self) -> None:
        self.drafts = 0
        """Number of drafts: one request in one step."""
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted


class DraftScheduler:
    """Add draft tokens to plans and count how many are accepted. Only for executors that finish a step before
    the next one is scheduled.
    """

    def __init__(
        self,
        rows: int,
        kv_cache: KVCacheManager,
        proposers: Sequence[Proposer] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`rows`: maximum rows of a step with drafts; 0 turns drafts off. `proposers`: those that run a
        model, in order of preference.
        """
        self._rows = rows
        self._kv_cache = kv_cache
        self._model = next(iter(proposers), None)
        self._length = DraftLength()
        self._answers = SuffixStores()
        self._clock = clock
        self._from_model: set[Request] = set()
        """Requests whose drafts in the current step come from the draft model."""
        self._began = 0.0
        methods: list[DraftMethod] = ["ngram", *(proposer.method for proposer in proposers)]
        self.counts = {method: AcceptanceCounts() for method in methods}

    def stats(self) -> dict[str, int]:
        """Return the counters of `EngineStats`."""
        counts = self.counts.values()
        model = self.counts.get("draft_model", AcceptanceCounts())
        return {
            "drafts": sum(each.drafts for each in counts),
            "draft_tokens": sum(each.draft_tokens for each in counts),
            "accepted_tokens": sum(each.accepted_tokens for each in counts),
            "model_draft_tokens": model.draft_tokens,
            "model_accepted_tokens": model.accepted_tokens,
        }

    def extend(self, plan: StepPlan, running: int) -> None:
        """Add drafts to the plan's decoding rows. `running`: requests that may need one more block each."""
        room, size = self._rows - plan.num_tokens, len(plan.rows)
        self._from_model.clear()
        if room >= size:  # proposing drafts has a cost too
            left = []
            for place, row in enumerate(plan.rows):
                if not row.samples or row.num_tokens != 1:
                    continue
                most = self._most(row.request, -(-room // (size - place)))
                drafts = self._propose(row.request, most)
                if self._model is not None and most > len(drafts) < MIN_NGRAM_DRAFTS:
                    left.append((place, drafts))
                else:
                    room -= self._add(plan, place, drafts, running)
            if left:
                self._draft_by_model(plan, left, room, running)
        self._began = self._clock()

    def record_step(self, plan: StepPlan) -> None:
        """Record that the step of the last `extend` has finished."""
        if self._model is not None and plan.num_tokens <= self._rows:
            self._length.record_step(self._clock() - self._began)

    def record_acceptance(self, row: ScheduledRequest, taken: list[SampledToken]) -> None:
        """Record how many drafts of a finished row were accepted. `taken`: tokens that the row gave.

        Resets `num_scheduled` to `num_computed`, because rows of rejected drafts are void.
        """
        request, drafted = row.request, len(row.drafts)
        accepted = sum(each.token_id == draft for each, draft in zip(taken, row.drafts, strict=False))
        request.num_scheduled = request.num_computed
        if self._model is not None and request in self._from_model:
            self._length.record_verification(request, drafted, accepted)
            self.counts[self._model.method].add(drafted, accepted)
            return
        assert request.drafter is not None
        request.drafter.record_verification(drafted, accepted)
        self.counts["ngram"].add(drafted, accepted)

    def remember(self, request: Request) -> None:
        """Keep the answer of a request that has ended, for drafts of later ones."""
        if self._rows and not request.pools:
            answer = request.token_ids[max(0, request.num_prompt - SIZE) :]
            self._answers.add(request.tenant, request.cache_namespace, answer)

    def end(self, request: Request) -> None:
        """Turn drafts off for this request."""
        assert request.drafter is not None
        request.drafter.end()

    def _most(self, request: Request, share: int) -> int:
        """Return the maximum number of drafts for a request that may have `share` rows."""
        # A step gives one token more than accepted drafts, and the KV of the last token is never computed.
        most = min(share, request.params.max_tokens - request.num_output - 1)
        if self._kv_cache.states is not None:
            most = min(most, self._kv_cache.states.pool.num_free)
        if request.drafter is None:
            earlier = self._answers.find(request.tenant, request.cache_namespace)
            request.drafter = NgramProposer(earlier)
        return 0 if request.drafter.has_ended else most

    def _propose(self, request: Request, most: int) -> list[int]:
        """Return drafts from n-grams."""
        if most <= 0:
            return []
        assert request.num_pending == 1
        assert request.drafter is not None
        return request.drafter.propose(request.token_ids, most)

    def _draft_by_model(
        self, plan: StepPlan, left: Sequence[tuple[int, list[int]]], room: int, running: int
    ) -> None:
        """Add drafts of the draft model where they are expected to pay, else those that n-grams proposed.
        `left`: places in the plan, with these.
        """
        assert self._model is not None
        wanted, places = list[tuple[Request, int]](), list[int]()
        for number, (place, drafts) in enumerate(left):
            request = plan.rows[place].request
            most = self._most(request, -(-room // (len(left) - number)))
            most = self._slots(request, self._length.choose(request, most), running)
            if most > 0:
                wanted.append((request, most))
                places.append(place)
                room -= most
            else:
                room -= self._add(plan, place, drafts[: max(room, 0)], running)
        if not wanted:
            return
        began = self._clock()
        proposed = self._model.propose(wanted)
        if proposed.rows <= CAUGHT_UP_ROWS * proposed.passes * len(wanted):
            self._length.record_passes(self._clock() - began, proposed.passes)
        for place, drafts in zip(places, proposed.drafts, strict=True):
            if self._add(plan, place, drafts, running):
                self._from_model.add(plan.rows[place].request)

    def _add(self, plan: StepPlan, place: int, drafts: list[int], running: int) -> int:
        """Add the drafts that have KV slots to a row of the plan; return their number."""
        if self._kv_cache.states is not None:  # drafts of other requests have taken some meanwhile
            drafts = drafts[: self._kv_cache.states.pool.num_free]
        drafts = drafts[: self._slots(plan.rows[place].request, len(drafts), running)]
        if not drafts:
            return 0
        plan.rows[place] = row = replace(plan.rows[place], num_tokens=1 + len(drafts), drafts=drafts)
        row.request.num_scheduled += len(drafts)
        if self._kv_cache.states is not None:
            self._kv_cache.states.plan_drafts(row)
        if self._kv_cache.windows is not None:
            self._kv_cache.windows.cover(row.request, row.start, row.end)
        return len(drafts)

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
