"""Scheduler and KV cache without a model: recorded names replace the tokens."""

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from ...config import SchedulerConfig
from ...errors import DoesNotFit
from ...ipc.sequence_times import (
    POOLED,
    POOLED_LAST,
    PROMPT_LOGPROBS,
    DraftedRow,
    EngineFacts,
    ScheduleRecord,
    decode_drafts,
)
from ...sampling_params import SamplingParams
from ..kv_cache.block_pool import BlockPool
from ..request import Request
from ..scheduler import Scheduler
from ..speculation.draft_scheduler import DraftScheduler
from ..step import ONE_STAGE, PipelineDepth, SampledToken, ScheduledRequest, StepPlan, StepResult

GOING_ON: Final = SampledToken(0)
LAST: Final = SampledToken(1)
OnPlan = Callable[[StepPlan], None]


@dataclass(slots=True, kw_only=True)
class ScheduleOutcome:
    """Outcome of one replay. Times are in seconds."""

    requests: int = 0
    refused: int = 0
    """Sequences that can never fit into these limits."""
    steps: int = 0
    rows: int = 0
    """Sequences in each step, summed."""
    tokens: int = 0
    """Tokens computed: of prompts, answers, and again after preemptions."""
    output_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    most_running: int = 0
    most_waiting: int = 0
    most_blocks: int = 0
    """Blocks in use at most, without those that only the prefix cache held."""
    span_s: float = 0.0
    """From the first arrival to the last end."""
    queue_s: list[float] = field(default_factory=list)
    """Waits for the first admission: the 50th, 95th and 99th percentile, and the longest; as the next two."""
    first_token_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)


class BlockNames(NamedTuple):
    """Names of the full blocks of a sequence, in order, with each set of LongRoPE's factors. Models without
    it have the first ones alone.
    """

    short: list[bytes]
    long: list[bytes]


class ReplayedRequest(Request):
    """Sequence whose blocks have recorded names: others once it has LongRoPE's long factors."""

    __slots__ = ("long_names",)

    long_names: list[bytes]

    def choose_factors(self, short_context: int) -> None:
        was_long = self.is_long
        Request.choose_factors(self, short_context)
        if self.is_long and not was_long:
            self.block_hashes = list(self.long_names)


class RecordedDrafts(DraftScheduler):
    """Gives rows the number of draft tokens that they had, and accepts as many as were accepted."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler.config, scheduler.kv_cache)
        self._records: dict[str, dict[int, DraftedRow]] = {}

    def begin(self, record: ScheduleRecord) -> None:
        rows, end = dict[int, DraftedRow](), record.resumed
        for row in decode_drafts(record.drafts):
            rows[end + row.gap] = row
            end += row.gap + row.accepted + 1
        if rows:
            self._records[str(record.number)] = rows

    def awaits_tokens(self, requests: Iterable[Request]) -> bool:
        if not self._records:
            return False
        return any(each.has_open_drafts or self._drafts_follow(each) for each in requests)

    def extend(self, plan: StepPlan, running: int, pipeline: PipelineDepth = ONE_STAGE) -> None:  # noqa: ARG002
        if not self._records:
            return
        for place, row in enumerate(plan.rows):
            drafted = self.find(row)
            if drafted is None or row.request.num_unknown or row.num_tokens != 1 or not row.samples:
                continue
            self.add(plan, place, [GOING_ON.token_id] * drafted.drafted, running)

    def _drafts_follow(self, request: Request) -> bool:
        """Return True if a row with drafts follows the tokens of launched steps."""
        rows = self._records.get(request.request_id, {})
        return request.num_pending > 0 and request.num_output + request.num_pending in rows

    def find(self, row: ScheduledRequest) -> DraftedRow | None:
        """Return the recorded drafts of the row at the same output length."""
        rows = self._records.get(row.request.request_id)
        return None if rows is None else rows.get(row.request.num_output)

    def record_acceptance(self, row: ScheduledRequest, taken: list[SampledToken]) -> bool:  # noqa: ARG002
        return False

    def forget(self, name: str) -> None:
        self._records.pop(name, None)


class ReplayedEngine:
    """Scheduler and cache, driven as by `Engine`; the tokens come from the records."""

    def __init__(self, facts: EngineFacts, clock: Callable[[], float], on_plan: OnPlan | None = None) -> None:
        config = SchedulerConfig(
            context=facts.context,
            max_running=facts.max_running,
            token_budget=facts.token_budget,
            mixed_budget=facts.mixed_budget,
            batching="static" if facts.static else "continuous",
            chunked_prefill=facts.chunked,
            premium_share=facts.premium_share,
            ageing_seconds=facts.ageing,
            watermark=facts.watermark,
            state_slots=facts.state_slots,
            window=facts.window,
            window_blocks=facts.window_blocks,
            short_context=facts.short_context,
        )
        pool = BlockPool(facts.num_blocks, facts.block_size, enable_prefix_cache=facts.caching)
        self.scheduler = Scheduler(config, pool, clock)
        self.scheduler.ledger.recorder = None
        self._drafts = self.scheduler.drafting = RecordedDrafts(self.scheduler)
        self.outcome = ScheduleOutcome()
        self._depth = facts.depth
        self._pipeline = PipelineDepth(facts.stages, facts.depth + 1 - facts.stages)
        self._launched: deque[StepPlan] = deque()
        self._is_stuck = False
        self._clock, self._on_plan = clock, on_plan
        self._outputs: dict[str, float] = {}
        """Output of each sequence at its end; infinite for one that is aborted."""
        self._open: dict[str, Request] = {}
        self._queue_s: list[float] = []
        self._first_s: list[float] = []
        self._end_s: list[float] = []
        self._last_end = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launched)

    def add(self, record: ScheduleRecord, names: BlockNames, priority: int, output: float) -> None:
        """Queue a sequence, as it was when it came. It ends with `output` tokens."""
        name, known = str(record.number), record.prompt + record.resumed
        request = ReplayedRequest(
            request_id=name,
            prompt_ids=[0] * record.prompt,
            params=_params(record),
            priority=priority,
            tenant=str(record.tenant),
            fork_of=str(record.fork) if record.fork >= 0 else None,
            token_ids=[0] * known,
            block_hashes=names.short,
        )
        request.long_names = names.long
        self.outcome.requests += 1
        try:
            self.scheduler.add(request)
        except DoesNotFit:
            self.outcome.refused += 1
            return
        self._outputs[name] = output
        self._open[name] = request
        self._drafts.begin(record)

    def abort(self, number: int) -> bool:
        """Remove a sequence. False if it is not there."""
        name = str(number)
        if not self.scheduler.abort(name):
            return False
        self._note_end(name)
        return True

    @property
    def is_stuck(self) -> bool:
        """True if no step can be planned before another sequence comes or is aborted."""
        return self._is_stuck

    def schedule(self) -> StepPlan:
        """Plan one step and launch it."""
        plan = self.scheduler.schedule(self._pipeline)
        self._is_stuck = not (plan.rows or self._launched)
        outcome = self.outcome
        if plan.rows:
            self._launched.append(plan)
            outcome.steps += 1
            outcome.rows += len(plan.rows)
            outcome.tokens += plan.num_tokens
            if self._on_plan is not None:
                self._on_plan(plan)
        outcome.most_running = max(outcome.most_running, self.scheduler.num_running)
        outcome.most_waiting = max(outcome.most_waiting, self.scheduler.num_waiting)
        outcome.most_blocks = max(outcome.most_blocks, self.scheduler.pool.num_used)
        return plan

    def collect(self, plan: StepPlan) -> list[int]:
        """Apply the oldest launched step, if it is due. Returns the numbers of sequences that ended."""
        if not self._launched or (plan.rows and len(self._launched) <= self._depth):
            return []
        oldest, ended, now = self._launched.popleft(), [], self._clock()
        for output in self.scheduler.update(oldest, self._result(oldest)):
            request = self._open[output.request_id]
            if output.token_ids and request.num_output == len(output.token_ids):
                self._first_s.append(now - request.arrived_at)
            self.outcome.output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._note_end(output.request_id)
                ended.append(int(output.request_id))
        return ended

    def finish(self, began: float) -> ScheduleOutcome:
        """Return the outcome. `began`: the clock at the first arrival."""
        outcome, scheduler = self.outcome, self.scheduler
        outcome.preemptions = scheduler.active.preemptions
        outcome.evictions = scheduler.pool.evictions
        outcome.prefix_queries = scheduler.kv_cache.prefix_queries
        outcome.prefix_hits = scheduler.kv_cache.prefix_hits
        outcome.span_s = max(0.0, self._last_end - began)
        outcome.queue_s = percentiles(self._queue_s)
        outcome.first_token_s = percentiles(self._first_s)
        outcome.end_s = percentiles(self._end_s)
        return outcome

    def _note_end(self, name: str) -> None:
        request, now = self._open.pop(name), self._clock()
        del self._outputs[name]
        self._drafts.forget(name)
        scheduled = now if request.scheduled_at is None else request.scheduled_at
        self._queue_s.append(scheduled - request.arrived_at)
        self._end_s.append(now - request.arrived_at)
        self._last_end = now
        self.scheduler.ledger.take()

    def _result(self, plan: StepPlan) -> StepResult:
        outputs, result = self._outputs, StepResult()
        tokens, pooled = result.tokens, result.pooled
        for row in plan.rows:
            request = row.request
            name = request.request_id
            if row.samples:
                end = row.end
                if row.drafts:
                    drafted = self._drafts.find(row)
                    accepted = 0 if drafted is None else min(drafted.accepted, len(row.drafts))
                    result.accepted[name] = [GOING_ON] * accepted
                    end += accepted - len(row.drafts)
                is_last = end - request.num_prompt + 1 >= outputs.get(name, math.inf)
                tokens[name] = LAST if is_last else GOING_ON
            elif request.pools:
                pooled[name] = array("q")
        return result


def _params(record: ScheduleRecord) -> SamplingParams:
    flags = record.flags
    params = SamplingParams(max_tokens=record.limit, stop_token_ids=(LAST.token_id,))
    if flags & POOLED:
        return replace(params, pooling="last" if flags & POOLED_LAST else "mean")
    return replace(params, prompt_logprobs=0) if flags & PROMPT_LOGPROBS else params


def percentiles(values: list[float]) -> list[float]:
    """Return the 50th, 95th and 99th percentile by nearest rank, and the largest; none of no values."""
    ordered = sorted(values)
    ranks = [math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.95, 0.99, 1.0)]
    return [ordered[rank] for rank in ranks] if ordered else []
