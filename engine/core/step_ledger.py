"""Records of steps: a ledger from which the time of each sequence is split, and what the scheduler was given.

The ledger's totals advance once a step. A sequence keeps them as they were when a phase of it began; the
differences at its end are the times of a sequence with one token in each step. Only rows of more tokens
(prompts, drafts) and steps without a row are corrected one by one, so a decoding step costs the same for any
number of rows.

    queued --admit--> prefill ------> decode --end--> SequenceTimes
                                       ^  |
               recompute <--admit-- preempted

`ScheduleRecorder` makes one small record for each sequence, for `schedule_replay.py`. Prefixes are recorded
as places: "its first 12 blocks are those of sequence 40". The hashes by which the recorder finds that stay in
memory, and no hash is made for it that the prefix cache did not need.
"""

import operator
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from ..config import SchedulerConfig
from ..ipc.sequence_times import (
    ABORTED,
    ADAPTER,
    DRAFTED,
    IMAGES,
    LENGTHENED,
    LIMITED,
    POOLED,
    POOLED_LAST,
    PROMPT_LOGPROBS,
    DraftedRow,
    EngineFacts,
    PhaseTimes,
    ScheduleRecord,
    SequenceTimes,
    StepWork,
    encode_drafts,
)
from .kv_cache.prefix_cache import BlockOwners
from .step import ONE_STAGE, PipelineDepth, finish_reason

if TYPE_CHECKING:
    from .kv_cache.manager import KVCacheManager
    from .request import Request
    from .step import ScheduledRequest, StepPlan


LEAST_BLOCKS: Final = 8192
_MOST_TENANTS: Final = 10_000
_MOST_DRAFTED_ROWS: Final = 1000
"""Rows with drafts that are remembered of a sequence: more than a record has room for."""


class _Arrival(NamedTuple):
    number: int
    call: int
    resumed: int
    fork: int
    short_link: tuple[int, int] | None = None
    """Link of its blocks before it was computed again with LongRoPE's long factors; None: it was not."""


@dataclass(slots=True)
class _Drafts:
    """Rows of a sequence that had draft tokens."""

    end: int
    """Tokens of output after the last one."""
    rows: list[DraftedRow] = field(default_factory=list)
    is_whole: bool = True


class ScheduleRecorder:
    """Written by the scheduler. Remembers the blocks of ended sequences: twice those of the pool at most."""

    def __init__(self, config: SchedulerConfig, kv_cache: "KVCacheManager") -> None:
        self._config, self._kv_cache, self._pool = config, kv_cache, kv_cache.pool
        self._run = secrets.randbits(32)
        self._calls = self._count = 0
        self._pipeline = ONE_STAGE
        self._facts: EngineFacts | None = None
        self._origin: float | None = None
        self._arrivals: dict[str, _Arrival] = {}
        self._drafts: dict[str, _Drafts] = {}
        self._tenants: dict[str, int] = {}
        self._owners = BlockOwners(max(LEAST_BLOCKS, 2 * kv_cache.pool.num_blocks))

    def note_step(self, pipeline: PipelineDepth) -> None:
        """Count a call of `schedule`."""
        self._calls += 1
        self._pipeline = pipeline

    def begin(self, request: "Request", sibling: "Request | None") -> None:
        """Record the arrival of a sequence. `sibling`: the choice whose prompt it shares."""
        if self._origin is None:
            self._origin = request.arrived_at
        of_sibling = None if sibling is None else self._arrivals.get(sibling.request_id)
        fork = -1 if of_sibling is None else of_sibling.number
        self._arrivals[request.request_id] = _Arrival(self._count, self._calls, request.num_output, fork)
        self._count += 1

    def note_drafts(self, row: "ScheduledRequest", taken: int, *, is_of_model: bool) -> None:
        """Record a row with draft tokens that gave `taken` tokens. What a model proposes may be fewer tokens
        than it was given blocks for: no replay knows that.
        """
        name, end = row.request.request_id, row.request.num_output
        drafts = self._drafts.get(name)
        if drafts is None:
            drafts = self._drafts[name] = _Drafts(self._arrivals[name].resumed)
        drafts.is_whole &= not is_of_model and len(drafts.rows) < _MOST_DRAFTED_ROWS
        if drafts.is_whole:
            drafts.rows.append(DraftedRow(end - taken - drafts.end, len(row.drafts), taken - 1))
            drafts.end = end

    def note_lengthening(self, request: "Request") -> None:
        """Record the blocks of a sequence that is about to lose them, to be computed again with other factors
        of RoPE.
        """
        arrival = self._arrivals[request.request_id]
        link = self._link(arrival.number, request)
        self._arrivals[request.request_id] = arrival._replace(short_link=link)

    def end(self, request: "Request", now: float) -> ScheduleRecord:
        """Return the record of a sequence that leaves, with whatever end."""
        arrival = self._arrivals.pop(request.request_id)
        short_owner, short_shared = arrival.short_link or (-1, 0)
        owner, shared = self._link(arrival.number, request)
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.clear()  # callers may then have numbers of earlier ones: a replay shares otherwise
        record = ScheduleRecord(
            run=self._run,
            facts=self._facts_now(),
            number=arrival.number,
            call=arrival.call,
            arrived=self._micros(request.arrived_at),
            prompt=request.num_prompt,
            resumed=arrival.resumed,
            output=request.num_output,
            limit=request.params.max_tokens,
            end_call=self._calls,
            ended=self._micros(now),
            flags=_flags(request) | (LENGTHENED if arrival.short_link else 0),
            priority=request.priority,
            tenant=self._tenants.setdefault(request.tenant, len(self._tenants)),
            fork=arrival.fork,
            owner=owner,
            shared=shared,
            short_owner=short_owner,
            short_shared=short_shared,
        )
        if (drafts := self._drafts.pop(request.request_id, None)) is None:
            return record
        data, has_room = encode_drafts(drafts.rows, record.room)
        is_whole = has_room and drafts.is_whole
        return record._replace(drafts=data, flags=record.flags | (0 if is_whole else DRAFTED))

    def _micros(self, at: float) -> int:
        return round(1e6 * (at - (self._origin or 0.0)))

    def _link(self, number: int, request: "Request") -> tuple[int, int]:
        return self._owners.link(number, request.block_hashes) if self._pool.caching else (-1, 0)

    def _facts_now(self) -> EngineFacts:
        if self._facts is None:
            config, pool, pipeline = self._config, self._pool, self._pipeline
            self._facts = EngineFacts(
                context=config.context,
                max_running=config.max_running,
                token_budget=config.token_budget,
                num_blocks=pool.num_blocks,
                block_size=pool.block_size,
                caching=pool.caching,
                chunked=config.chunked_prefill,
                static=config.batching == "static",
                ageing=config.ageing_seconds,
                premium_share=config.premium_share,
                watermark=config.watermark,
                depth=pipeline.ahead + pipeline.stages - 1,
                stages=pipeline.stages,
                state_slots=config.state_slots,
                window=config.window,
                window_blocks=config.window_blocks,
                disk=self._kv_cache.tiers is not None or self._kv_cache.intake is not None,
                mixed_budget=config.mixed_budget,
                short_context=config.short_context,
            )
        return self._facts


def _flags(request: "Request") -> int:
    is_done = request.num_computed == request.num_tokens if request.pools else finish_reason(request)
    told = (
        (ABORTED, not is_done),
        (POOLED, request.pools),
        (POOLED_LAST, request.params.pooling == "last"),
        (PROMPT_LOGPROBS, request.params.prompt_logprobs is not None),
        (IMAGES, bool(request.images)),
        (ADAPTER, bool(request.adapter)),
        (LIMITED, request.constraint is not None),
    )
    return sum(flag for flag, holds in told if holds)


class StepTotals(NamedTuple):
    """Totals over all steps, as a sequence with one token in each of them counts them."""

    seconds: float = 0.0
    own: float = 0.0
    prompts: float = 0.0
    """Shares of prompts, its own included."""
    steps: int = 0
    mixed: int = 0
    """Number of steps with prompts, its own included."""
    others: int = 0


ZERO: Final = StepTotals()


class SequenceClock:
    """Phases of one sequence, from its arrival on."""

    def __init__(self, ledger: "StepLedger", arrived_at: float) -> None:
        self._ledger = ledger
        self._arrived_at = self._since = arrived_at
        self._start = ZERO
        self._waits = {"queued": 0.0, "preempted": 0.0}
        self._phases: dict[str, PhaseTimes] = {}
        self._phase: PhaseTimes | None = None
        """Phase that runs; None while it waits."""
        self._preemptions = 0

    def admit(self, *, decodes: bool) -> None:
        """End a wait. `decodes`: the next row gives a token already."""
        self._close()
        name = "decode" if decodes else "recompute" if self._phases else "prefill"
        self._phase = self._phases.setdefault(name, PhaseTimes())

    def requeue(self, request: "Request") -> None:
        """Begin the wait after a preemption, or to be computed again with other factors of RoPE."""
        self._close()
        self._phase = None
        self._preemptions += 1
        if request.outgrows_factors and self._ledger.recorder is not None:
            self._ledger.recorder.note_lengthening(request)

    def begin_decode(self) -> None:
        """End the phase of a prompt, or of tokens that were computed again."""
        self._close()
        self._phase = self._phases.setdefault("decode", PhaseTimes())

    def end(self, schedule: ScheduleRecord | None) -> SequenceTimes:
        """End the sequence and return its times, with the record of its scheduling."""
        self._close()
        return SequenceTimes(
            schedule=schedule,
            arrived_at=self._arrived_at,
            ended_at=self._since,
            preemptions=self._preemptions,
            queued=self._waits["queued"],
            preempted=self._waits["preempted"],
            prefill=self._phases.get("prefill", PhaseTimes()),
            recompute=self._phases.get("recompute", PhaseTimes()),
            decode=self._phases.get("decode", PhaseTimes()),
        )

    def correct(self, more: float, prompts: float, *, alone: bool) -> None:
        """Correct the last step, in which it had more than one token: `more` seconds are its own, and of
        those of prompts `prompts` were. `alone`: the only prompt of the step is its own.
        """
        if (phase := self._phase) is not None:
            phase.own += more
            phase.prompts -= prompts
            phase.decoding -= more - prompts
            phase.mixed -= alone

    def miss(self, step: StepTotals) -> None:
        """Correct a step in which the sequence had no token."""
        if (phase := self._phase) is not None:
            phase.own -= step.own
            phase.prompts -= step.prompts
            phase.decoding -= step.seconds - step.own - step.prompts
            phase.absent += step.seconds
            phase.steps -= step.steps
            phase.mixed -= step.mixed
            phase.others -= step.others

    def _close(self) -> None:
        """Add the time since the last change to the wait or the phase that ends."""
        now, totals = self._ledger.clock(), self._ledger.totals
        elapsed, self._since = now - self._since, now
        seconds, own, prompts, steps, mixed, others = map(operator.sub, totals, self._start)
        self._start = totals
        if (phase := self._phase) is None:
            self._waits["preempted" if self._phases else "queued"] += elapsed
            return
        phase.own += own
        phase.prompts += prompts
        phase.decoding += seconds - own - prompts
        phase.between += max(0.0, elapsed - seconds)
        # A step that had been launched when the phase began has no row of it.
        phase.absent += min(0.0, elapsed - seconds)
        phase.steps += int(steps)
        phase.mixed += int(mixed)
        phase.others += int(others)


class StepLedger:
    """Totals of all steps of one engine. Written by the engine, read by the clocks of its sequences."""

    def __init__(self, clock: Callable[[], float], recorder: ScheduleRecorder) -> None:
        self.clock = clock
        self.recorder: ScheduleRecorder | None = recorder
        """None: nothing is recorded, as when a record is replayed."""
        self.totals = ZERO
        self.work = StepWork()
        self._ended: dict[str, SequenceTimes] = {}

    def advance(
        self, plan: "StepPlan", tokens: int, seconds: float, running: Mapping[str, "Request"]
    ) -> None:
        """Add a step, before its result is applied. `tokens`: those of all rows."""
        rows = plan.rows
        chunks = [row for row in rows if row.num_tokens > 1] if tokens > len(rows) else []
        prompts = sum(row.num_tokens for row in chunks if not row.drafts)
        share = seconds / tokens
        step = StepTotals(seconds, share, share * prompts, 1, int(prompts > 0), len(rows) - 1)
        self.totals = StepTotals(*map(operator.add, self.totals, step))
        self._count(seconds, prompts, len(rows) - sum(not row.drafts for row in chunks))
        for row in chunks:
            if row.admission == row.request.admissions:
                _correct(row, share, prompts)
        if len(rows) < len(running):
            present = {row.request.request_id for row in rows if row.admission == row.request.admissions}
            for name, request in running.items():
                if name not in present and request.clock is not None:
                    request.clock.miss(step)

    def _count(self, seconds: float, prompts: int, decoding: int) -> None:
        work, has_prompts = self.work, prompts > 0
        self.work = StepWork(
            steps=work.steps + 1,
            seconds=work.seconds + seconds,
            decode_rows=work.decode_rows + decoding,
            prefill_steps=work.prefill_steps + has_prompts,
            prefill_seconds=work.prefill_seconds + (seconds if has_prompts else 0.0),
            prefill_tokens=work.prefill_tokens + prompts,
        )

    def begin(self, request: "Request", sibling: "Request | None") -> None:
        """Begin the times of a sequence that arrives. `sibling`: the choice whose prompt it shares."""
        request.clock = SequenceClock(self, request.arrived_at)
        if self.recorder is not None:
            self.recorder.begin(request, sibling)

    def note_step(self, pipeline: PipelineDepth) -> None:
        """Count a step that is about to be scheduled."""
        if self.recorder is not None:
            self.recorder.note_step(pipeline)

    def note_drafts(self, row: "ScheduledRequest", taken: int, *, is_of_model: bool) -> None:
        """Record a row with draft tokens that gave `taken` tokens."""
        if self.recorder is not None:
            self.recorder.note_drafts(row, taken, is_of_model=is_of_model)

    def end(self, request: "Request") -> None:
        """Keep the times of a sequence that leaves the engine until `take`."""
        if request.clock is not None:
            schedule = None if self.recorder is None else self.recorder.end(request, self.clock())
            self._ended[request.request_id] = request.clock.end(schedule)

    def take(self) -> dict[str, SequenceTimes]:
        """Return the times of sequences that ended since the last call."""
        ended, self._ended = self._ended, {}
        return ended


def _correct(row: "ScheduledRequest", share: float, prompts: int) -> None:
    """Correct the times of a sequence by its row of several tokens."""
    request, clock = row.request, row.request.clock
    if clock is None:
        return
    more = share * (row.num_tokens - 1)
    if row.drafts:
        clock.correct(more, 0.0, alone=False)
        return
    clock.correct(more, share * row.num_tokens, alone=row.num_tokens == prompts)
    if row.end >= request.num_tokens - 1:
        clock.begin_decode()
