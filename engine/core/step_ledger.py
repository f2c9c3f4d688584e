"""Ledger of steps: running totals from which the time of each sequence is split.

The totals advance once a step. A sequence keeps them as they were when a phase of it began; the differences
at its end are the times of a sequence with one token in each step. Only rows of more tokens (prompts, drafts)
and steps without a row are corrected one by one, so a decoding step costs the same for any number of rows.

    queued --admit--> prefill ------> decode --end--> SequenceTimes
                                       ^  |
               recompute <--admit-- preempted
"""

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from ..ipc.sequence_times import PhaseTimes, ScheduleRecord, SequenceTimes, StepWork
from .executor_interface import PipelineDepth
from .schedule_recorder import ScheduleRecorder

if TYPE_CHECKING:
    from .request import Request
    from .step import ScheduledRequest, StepPlan


class StepTotals(NamedTuple):
    """Totals of a sequence that has one token in each step."""

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

    def requeue(self) -> None:
        """Begin the wait after a preemption."""
        self._close()
        self._phase = None
        self._preemptions += 1

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
        """Correct a step in which it had no token."""
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
