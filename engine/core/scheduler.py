"""Scheduler: decides which tokens of which requests each step computes. Pure Python with an injected clock.

There are no prefill and decode phases, only "request -> number of tokens in this step". A request with one
token left to compute is decoding. A request with more has a prompt to compute, or a history lost by
preemption or a restart, in as many chunks as the token budget requires.

    add -> waiting --admit--> running --update--> finished
              ^                  |
              +-----preempt------+        blocks are freed; tokens are kept and computed again
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..config import SchedulerConfig
from ..ipc.messages import RequestOutput
from .images import ImageScheduler
from .kv_cache.block_pool import BlockPool
from .kv_cache.handover import DECODE_PROMPT_TOKENS
from .kv_cache.manager import KVCacheManager
from .preemption import RunningRequests
from .request import Request
from .request_queue import ALL_BANDS, LIFTED_TOKENS, NO_BAND, Flow, Flows, WaitingQueue, is_premium
from .speculation.draft_scheduler import DraftScheduler
from .speculation.proposer import Proposer
from .step import (
    ONE_STAGE,
    MicroBatcher,
    PipelineDepth,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    StepResult,
    add_up,
    finish_reason,
    make_failure_output,
    make_pooling_output,
    make_token_output,
    schedule_tokens,
)
from .step_ledger import ScheduleRecorder, StepLedger


class Scheduler:
    """Requests of one engine, waiting and running, and the plans of its steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        clock: Callable[[], float] = time.monotonic,
        proposers: Sequence[Proposer] = (),
        images: ImageScheduler | None = None,
    ) -> None:
        """`images`: scheduler of the images of prompts; None for a model that reads none."""
        self.config = config
        self.images = images
        self.pool = pool
        self.kv_cache = KVCacheManager(config, pool)
        self.drafting = DraftScheduler(config, self.kv_cache, proposers, clock)
        self._clock = clock
        self.ledger = StepLedger(clock, ScheduleRecorder(config, self.kv_cache))
        self._last_arrival = -math.inf
        self._requests: dict[str, Request] = {}
        self._flows = Flows()
        self._waiting = WaitingQueue(config.ageing_seconds, self._flows, clock)
        self.active = RunningRequests(config.max_running, self.kv_cache, self._flows, self._waiting)
        self._running = self.active.by_id
        self._microbatches = MicroBatcher()
        self._was_express = False
        self.prompt_tokens = self.output_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Iterable[Request]:
        return self._running.values()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def slots_used(self) -> int:
        """Number of KV slots that hold a token. Blocks in several tables are full and count once."""
        return self.kv_cache.slots_used(self._running.values())

    # ------------------------------------------------------------------ add, abort

    def has(self, request_id: str) -> bool:
        """Return True if a request with this id waits or runs."""
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request whose id is not present. Raises `DoesNotFit` if it can never be served."""
        self.kv_cache.refuse_impossible(request)
        # Unique, so that "newest" and "first come" are decided even when the clock does not advance.
        request.arrived_at = max(self._clock(), math.nextafter(self._last_arrival, math.inf))
        self._last_arrival = request.arrived_at
        request.choose_factors(self.config.short_context)
        sibling = self._sibling(request)
        self.ledger.begin(request, sibling)
        self._requests[request.request_id] = request
        self._flows.enter(request)
        if sibling is not None and not sibling.has_computed_prompt and self.config.batching != "static":
            self._waiting.push_aside(request, sibling)
        elif self.kv_cache.read_ahead(request):
            self._waiting.hold(request)
        else:
            self._waiting.push(request)

    def abort(self, request_id: str) -> bool:
        """Remove a waiting or running request and free its blocks at once. False if there is none."""
        if (request := self._requests.get(request_id)) is not None:
            self._remove(request)
        return request is not None

    def _remove(self, request: Request, *, suspect: bool = False) -> None:
        del self._requests[request.request_id]
        if request.request_id in self._running:
            self.drafting.remember(request)
            self.active.stop(request, suspect=suspect)
        else:
            self._waiting.discard(request)
        if request.images and self.images is not None:
            self.images.leave(request)
        self._flows.leave(request)
        self.ledger.end(request)
        self._waiting.end_fork_wait(request)
        self.kv_cache.forget(request)

    def _sibling(self, request: Request) -> Request | None:
        """Return the request of the same `n > 1` call that `request` may share prompt blocks with."""
        sibling = self._requests.get(request.fork_of or "")
        return sibling if sibling is not None and sibling.has_prompt_of(request) else None

    def _computed_sibling(self, request: Request) -> Request | None:
        """Return the sibling, unless it was preempted meanwhile: there is no reason to wait again."""
        sibling = self._sibling(request)
        return sibling if sibling is not None and sibling.has_computed_prompt else None

    # ------------------------------------------------------------------ schedule

    def schedule(self, pipeline: PipelineDepth = ONE_STAGE) -> StepPlan:
        """Plan the next step: decoding requests first, so that streams never starve; then prompts, running or
        waiting, in the order of `WaitingQueue.choose`. The steps of several stages share the token budget.

        Premium prompts get a step without the streams of other classes (an express step), at most every
        second one. No row is planned while drafts wait for tokens of launched steps.
        """
        plan = StepPlan()
        self.ledger.note_step(pipeline)
        for request in self.kv_cache.take_in(is_decoding=bool(self._running)):
            self._waiting.release(request)
        if self.images is not None:
            for request in self.images.take_ready():
                self._waiting.release(request)
        self.active.grow()
        if self._waiting and self.config.batching == "continuous":
            self.active.displace()
        decoding, prompts = self._by_phase()
        has_prompts = bool(prompts or self._waiting)
        may_prefill = prompts or (self._waiting and len(self._running) < self.config.max_running)
        if pipeline.ahead and not may_prefill and self.drafting.awaits_tokens(self._running.values()):
            return plan
        budget = pipeline.share((self.config.mixed_budget if decoding else 0) or self.config.token_budget)
        express = has_prompts and not self._was_express
        self._was_express = express and self._schedule_express(plan, budget, decoding, prompts, pipeline)
        if not self._was_express:
            self._schedule_decoding(plan, self._microbatches.next_microbatch(decoding, pipeline))
            if has_prompts:
                self._schedule_prompts(plan, self._prompt_budget(plan, budget), prompts)
        if not plan.rows:
            self._schedule_decoding(plan, self._microbatches.fill_bubble(decoding, pipeline))
        self.drafting.extend(plan, len(self._running), pipeline)
        self._microbatches.record(plan)
        return plan

    def _prompt_budget(self, plan: StepPlan, budget: int) -> int:
        """Return the prompt tokens that a step may have beside the decoding requests in `plan`."""
        left, intake = budget - len(plan.rows), self.kv_cache.intake
        if intake is None or not plan.rows or intake.link.is_given_up:
            return left
        return min(left, DECODE_PROMPT_TOKENS)

    def _schedule_express(
        self,
        plan: StepPlan,
        budget: int,
        decoding: list[Request],
        prompts: list[Request],
        pipeline: PipelineDepth,
    ) -> bool:
        """Plan an express step: without the streams of other classes, which would delay the first token of
        premium requests. Returns False, with nothing planned, where no request gains by it.
        """
        going_on = [request for request in decoding if is_premium(request) or request.keeps_place]
        urgent = [request for request in prompts if is_premium(request)]
        is_static = self.config.batching == "static"
        if is_static or len(going_on) == len(decoding) or not (urgent or self._waiting.num_queued(0)):
            return False
        self._schedule_prompts(plan, budget - len(going_on), urgent, better_than=0)
        if not plan.rows:
            return False
        self._schedule_decoding(plan, self._microbatches.next_microbatch(going_on, pipeline))
        return True

    def _schedule_decoding(self, plan: StepPlan, decoding: Iterable[Request]) -> None:
        rows = [schedule_tokens(request, 1, 1) for request in decoding]
        for row in rows:
            self.kv_cache.prepare_row(row)
        plan.rows.extend(rows)
        self._flows.charge(rows)

    def _by_phase(self) -> tuple[list[Request], list[Request]]:
        """Return running requests with one token left to compute, known or not, and those with more. A
        request that needs its last token on the host is left out until it is known.
        """
        decoding, prompts = [], []
        for request in self._running.values():
            if request.num_remaining > 1 or (request.pools and request.num_remaining):
                prompts.append(request)
            elif request.pools:
                continue
            elif not request.num_pending or not (request.is_ending or request.needs_all_tokens):
                decoding.append(request)
        return decoding, prompts

    def _schedule_prompts(
        self, plan: StepPlan, budget: int, prompts: list[Request], better_than: int = ALL_BANDS
    ) -> None:
        """Admit waiting requests and continue running prompts, one chunk each.

        A waiting request that does not fit blocks all but better bands, so that large requests get their
        turn; a starved one blocks better bands too. A static batch is filled whatever the budget.
        """
        static = self.config.batching == "static"
        if static and self._running:
            better_than = NO_BAND
        by_flow: dict[Flow, list[Request]] = {}
        for request in sorted(prompts, key=lambda request: request.arrived_at, reverse=True):
            if request.keeps_place:
                budget = self._schedule_prompt(plan, budget, request)
            else:
                by_flow.setdefault(request.flow, []).append(request)
        while budget > 0 or (static and better_than == ALL_BANDS):
            if len(self._running) >= self.config.max_running:
                better_than = NO_BAND
            chosen, is_lifted = self._waiting.choose(by_flow, better_than)
            if chosen is None:
                break
            if chosen.request_id in self._running:
                by_flow[chosen.flow].pop()
            elif chosen.images and self._awaits_image(chosen):
                continue
            elif not self._admit(plan, chosen):
                better_than = NO_BAND if self._waiting.has_starved(chosen) else chosen.flow.band
                continue
            if is_lifted:
                chosen.num_protected = chosen.num_output + LIFTED_TOKENS
            budget = self._schedule_prompt(plan, budget, chosen)

    def _schedule_prompt(self, plan: StepPlan, budget: int, request: Request) -> int:
        """Schedule as much of the prompt as the budget allows, or all of it without chunking. Returns the
        budget that is left.
        """
        if budget <= 0:
            return budget
        remaining = request.num_remaining
        tokens = min(remaining, budget) if self.config.chunked_prefill else remaining
        if request.images and self.images is not None:
            tokens = self.images.limit(request, request.num_scheduled, tokens)
            if not tokens:
                return budget
        plan.rows.append(schedule_tokens(request, tokens, remaining))
        self.kv_cache.prepare_row(plan.rows[-1])
        self._flows.charge(plan.rows[-1:])
        self._flows.note_served(request, self._clock())
        return budget - tokens

    def _awaits_image(self, request: Request) -> bool:
        """Return True, with the request set aside, if its first row has to wait for an image."""
        assert self.images is not None  # `Engine.add` refuses images without
        known = self.kv_cache.known_tokens(request, self._computed_sibling(request))
        if self.images.may_begin(request, known):
            return False
        self._waiting.take(request)
        self._waiting.hold(request)
        return True

    def _admit(self, plan: StepPlan, request: Request) -> bool:
        """Move a waiting request to the running ones; False when blocks are short or come from disk."""
        if self.kv_cache.read_again(request):
            self._waiting.hold(request)
            return False
        copies = self.kv_cache.allocate(request, self._computed_sibling(request), alone=not self._running)
        if copies is None:
            return False
        plan.copies.extend(copies.blocks)
        plan.state_copies.extend(copies.states)
        self._waiting.take(request)
        self.active.start(request)
        assert request.clock is not None
        request.clock.admit(decodes=request.num_remaining == 1 and not request.pools)
        if request.scheduled_at is None:
            request.scheduled_at = self._clock()
            self.prompt_tokens += request.num_prompt
        return True

    # ------------------------------------------------------------------ update

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the result of a step. Returns one output per request that got a token or ended. Steps are
        applied in the order of their plans; later ones may be in flight.
        """
        outputs = []
        self.drafting.record_step(plan)
        for row in plan.rows:
            request, request_id = row.request, row.request.request_id
            if row.admission != request.admissions:  # ended, aborted or preempted since it was scheduled
                self.kv_cache.discard_row(row)
                continue
            if request_id in result.failed:
                self.kv_cache.discard_row(row)
                outputs += self._fail(row, result.failed[request_id])
                continue
            if request_id in result.prompt_logprobs and request.num_output == 0:
                request.prompt_logprobs += result.prompt_logprobs[request_id]
            if request_id in result.pooled:
                add_up(request.pooled, result.pooled[request_id])
            taken = result.tokens_of(row)
            if taken:
                request.append([each.token_id for each in taken])
            request.num_computed = end = row.end - row.num_rejected(len(taken))
            self.kv_cache.commit_row(row)
            if row.drafts:
                request.num_scheduled = end  # rows of rejected drafts are void
                is_of_model = self.drafting.record_acceptance(row, taken)
                self.ledger.note_drafts(row, len(taken), is_of_model=is_of_model)
            if taken:
                outputs.append(self._answer(request, taken, row.drafts))
            elif request.pools and end == request.num_tokens:
                self._remove(request)
                outputs.append(make_pooling_output(request))
        for sibling in map(self._requests.__getitem__, self._waiting.awaited_siblings()):
            if sibling.has_computed_prompt:
                self._waiting.end_fork_wait(sibling)
        return outputs

    def discard(self, plan: StepPlan) -> None:
        """Undo a step that failed. The KV that it wrote is unknown, so its requests are queued to be computed
        again from their tokens, and their blocks leave the prefix cache.
        """
        for row in plan.rows:
            self.kv_cache.discard_row(row)
            if row.admission == row.request.admissions:
                self.active.requeue(row.request, suspect=True)

    def _answer(self, request: Request, taken: list[SampledToken], drafts: Sequence[int]) -> RequestOutput:
        self.output_tokens += len(taken)
        if (reason := finish_reason(request)) is not None:
            self._remove(request)
        return make_token_output(request, taken, reason, drafts)

    def _fail(self, row: ScheduledRequest, message: str) -> list[RequestOutput]:
        """End the request with an error. If a draft may be the cause, compute it again without drafts."""
        request = row.request
        if not row.drafts:
            self._remove(request, suspect=True)
            return [make_failure_output(request, message)]
        self.drafting.end(request)
        self.active.requeue(request, suspect=True)
        return []

    def check(self) -> None:
        """Assert that every block is accounted for and every request is in exactly one queue."""
        self.pool.check()
        self._waiting.check()
        assert len(self._running) + len(self._waiting) == len(self._requests)
        held = Counter(self.kv_cache.loading("kv"))
        for request in self._running.values():
            assert self._requests[request.request_id] is request
            assert 0 <= request.num_computed <= request.num_scheduled
            assert request.num_computed < request.num_tokens
            assert request.has_open_drafts or request.num_remaining >= 0
            room = len(request.block_table) * self.pool.block_size
            assert request.num_scheduled <= min(request.num_short, room)
            held.update(request.block_table)
        self.pool.check_holders(held)
        self.kv_cache.check(list(self._running.values()))
        self._flows.check(running=len(self._running), present=len(self._requests))
        assert self.slots_used in range(self.pool.num_used * self.pool.block_size + 1)
