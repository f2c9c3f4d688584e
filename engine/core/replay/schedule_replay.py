"""Replay of scheduling: the real `Scheduler` and KV cache over recorded sequences, without a model.

`ScheduleReplay.follow` puts every arrival and abort between the same two steps as it was, so the steps are
the same, and fits what a step costs from the recorded times. `ScheduleReplay.simulate` then has arrivals at
their times and steps that take what they cost, also with other limits than the recorded ones.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...errors import EngineError
from ...ipc.sequence_times import ABORTED, LENGTHENED, EngineFacts, ScheduleRecord
from ..step import StepPlan
from .replayed_engine import BlockNames, OnPlan, ReplayedEngine, ScheduleOutcome

TERMS: Final = 4


class WorkTerms:
    """Sums of what steps computed: their number, tokens of prompts, rows of one token, and tokens of KV that
    were read.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Sequence[float] = (0.0,) * TERMS) -> None:
        self.terms = list(terms)

    def add(self, plan: StepPlan) -> None:
        if not plan.rows:
            return
        terms = self.terms
        terms[0] += 1
        for row in plan.rows:
            terms[1 if row.num_tokens > 1 else 2] += row.num_tokens
            terms[3] += row.end

    def copy(self) -> "WorkTerms":
        return WorkTerms(self.terms)

    def since(self, earlier: "WorkTerms") -> list[float]:
        """Return the work that has been added since."""
        return [now - then for now, then in zip(self.terms, earlier.terms, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepCost:
    """Seconds of a step, linear in its work."""

    step_s: float
    prompt_token_s: float
    row_s: float
    kv_token_s: float
    error: float = 0.0
    """Mean absolute error over the recorded times between two arrivals or ends, as a share of them."""
    intervals: int = 0
    """Number of these times that it was fitted from."""

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds of a step; 0 for an empty one."""
        work = WorkTerms()
        work.add(plan)
        steps, prompts, rows, kv = work.terms
        return steps * self.step_s + prompts * self.prompt_token_s + rows * self.row_s + kv * self.kv_token_s


def fit_cost(samples: Sequence[tuple[Sequence[float], float]]) -> LinearStepCost:
    """Fit the cost to (work, seconds) by least squares; no term is negative. Without a sample of any step a
    step takes a millisecond.
    """
    used = [(work, seconds) for work, seconds in samples if work[0] > 0]
    if not used:
        return LinearStepCost(step_s=0.001, prompt_token_s=0.0, row_s=0.0, kv_token_s=0.0)
    kept = [term for term in range(TERMS) if any(work[term] for work, _ in used)]
    while True:
        found = _solve(used, kept)
        if (found is not None and (not found or min(found) >= 0)) or len(kept) == 1:
            break
        # The most negative term explains least; a singular system has a term too many.
        worst = len(kept) - 1 if found is None else found.index(min(found))
        kept.pop(worst)
    if found is None or min(found) < 0:
        kept, found = [0], [sum(seconds for _, seconds in used) / sum(work[0] for work, _ in used)]
    terms = [0.0] * TERMS
    for term, value in zip(kept, found, strict=True):
        terms[term] = value
    wrong = sum(abs(sum(a * b for a, b in zip(terms, work, strict=True)) - took) for work, took in used)
    total = sum(took for _, took in used)
    return LinearStepCost(
        step_s=terms[0],
        prompt_token_s=terms[1],
        row_s=terms[2],
        kv_token_s=terms[3],
        error=wrong / total if total > 0 else 0.0,
        intervals=len(used),
    )


def _solve(samples: Sequence[tuple[Sequence[float], float]], kept: list[int]) -> list[float] | None:
    """Solve the normal equations of some terms, by elimination. None: they are singular."""
    scale = [max(work[term] for work, _ in samples) or 1.0 for term in kept]
    size = len(kept)
    rows = [[0.0] * (size + 1) for _ in range(size)]
    for work, seconds in samples:
        scaled = [work[term] / each for term, each in zip(kept, scale, strict=True)]
        for place, value in enumerate(scaled):
            for other in range(size):
                rows[place][other] += value * scaled[other]
            rows[place][size] += value * seconds
    for place in range(size):
        best = max(range(place, size), key=lambda row: abs(rows[row][place]))
        rows[place], rows[best] = rows[best], rows[place]
        pivot = rows[place][place]
        if abs(pivot) < 1e-9 * len(samples) or pivot == 0.0:
            return None
        for row in range(size):
            if row != place:
                factor = rows[row][place] / pivot
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[place], strict=True)]
    return [rows[place][size] / rows[place][place] / scale[place] for place in range(size)]


_BLOCK_BITS: Final = 24
_FACTORS_BIT: Final = 127
"""Bit of names of blocks with the long factors of LongRoPE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Limits to replay with in place of the recorded ones; None: as recorded."""

    num_blocks: int | None = None
    block_factor: float | None = None
    """Multiple of the recorded blocks, in place of a number."""
    max_running: int | None = None
    token_budget: int | None = None
    caching: bool | None = None
    ignore_priorities: bool = False

    @property
    def changes(self) -> bool:
        return self != WhatIf()

    def apply(self, facts: EngineFacts) -> EngineFacts:
        """Return facts with these limits. A budget below the running sequences is raised to them, unless both
        are given, which `SchedulerConfig` refuses.
        """
        running = facts.max_running if self.max_running is None else self.max_running
        budget = self.token_budget
        if budget is None:
            budget = max(facts.token_budget, running)
        elif self.max_running is None:
            running = min(running, budget)
        mixed = max(facts.mixed_budget, running) if facts.mixed_budget and self.token_budget is None else 0
        values: dict[str, Any] = {"max_running": running, "token_budget": budget, "mixed_budget": mixed}
        if self.num_blocks is not None:
            values |= {"num_blocks": self.num_blocks}
        elif self.block_factor is not None:
            values |= {"num_blocks": max(1, round(self.block_factor * facts.num_blocks))}
        if self.caching is not None:
            values |= {"caching": self.caching}
        return facts._replace(**values)


class RecordedBlocks:
    """Names of the blocks of recorded sequences: equal where their tokens and their factors of RoPE were."""

    def __init__(self, records: Iterable[ScheduleRecord], facts: EngineFacts) -> None:
        self._facts = facts
        self._links: dict[tuple[int, bool], tuple[int, int]] = {}
        """Owner and number of shared blocks, by number of the sequence and whether its factors are long."""
        for record in records:
            link = record.owner, record.shared
            if record.flags & LENGTHENED:
                self._links[record.number, False] = record.short_owner, record.short_shared
                self._links[record.number, True] = link
            else:
                self._links[record.number, self._outgrows(record.prompt + record.resumed)] = link

    def _outgrows(self, tokens: int) -> bool:
        return 0 < self._facts.short_context < tokens

    def names_of(self, record: ScheduleRecord) -> BlockNames:
        """Return the names of all full blocks of a sequence."""
        tokens = record.prompt + record.output
        may_be_long = self._outgrows(tokens)
        short = self._names(record.number, min(tokens, self._facts.short_context) if may_be_long else tokens)
        return BlockNames(short, self._names(record.number, tokens, is_long=True) if may_be_long else [])

    def _names(self, number: int, tokens: int, *, is_long: bool = False) -> list[bytes]:
        end = tokens // self._facts.block_size
        parts = []
        while end > 0:
            owner, shared = self._links.get((number, is_long), (-1, 0))
            first = (is_long << _FACTORS_BIT) + (number << _BLOCK_BITS)
            parts.append([(first + place).to_bytes(16, "big") for place in range(min(shared, end), end)])
            number, end = owner, min(end, shared)
        return [name for part in reversed(parts) for name in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSchedule:
    """Replay of the steps as they were."""

    outcome: ScheduleOutcome
    cost: LinearStepCost
    same_ends: int
    """Sequences that ended in the same step as recorded."""
    ends: int
    """Sequences that ended by their tokens."""


class ScheduleReplay:
    """Sequences of one engine, to be replayed. Those that are missing leave holes."""

    def __init__(self, records: Sequence[ScheduleRecord]) -> None:
        """`records`: at least one, all of one engine, in any order."""
        self.records = sorted(records, key=lambda record: record.number)
        self.facts = records[0].facts
        self._blocks = RecordedBlocks(records, self.facts)

    def follow(self, on_plan: OnPlan | None = None) -> FollowedSchedule:
        """Replay with arrivals and aborts between the same steps as recorded."""
        clock = _RecordedClock(self.records)
        engine = ReplayedEngine(self.facts, clock, on_plan)
        work, samples = WorkTerms(), list[tuple[list[float], float]]()
        ends, same = {record.number: record.end_call for record in self.records}, 0
        natural, is_busy, since, earlier = 0, False, 0.0, WorkTerms()
        began = clock.now = self.records[0].arrived / 1e6
        for call, now, record, arrives in _events(self.records):
            while clock.calls < call and engine.has_work:
                clock.calls += 1
                plan = engine.schedule()
                work.add(plan)
                clock.now = clock.time_at(clock.calls)
                for number in engine.collect(plan):
                    natural += 1
                    same += ends[number] == clock.calls
            if is_busy and clock.calls == call:
                samples.append((work.since(earlier), now - since))
            clock.calls, clock.now = call, now
            if arrives:
                output = math.inf if record.flags & ABORTED else record.output
                engine.add(record, self._blocks.names_of(record), record.priority, output)
            elif record.flags & ABORTED:
                engine.abort(record.number)
            since, earlier, is_busy = now, work.copy(), engine.has_work
        while engine.has_work:  # what ends later than recorded
            natural += len(engine.collect(engine.schedule()))
            _refuse_stuck(engine)
        return FollowedSchedule(
            outcome=engine.finish(began), cost=fit_cost(samples), same_ends=same, ends=natural
        )

    def simulate(
        self, cost: LinearStepCost, what_if: WhatIf | None = None, on_plan: OnPlan | None = None
    ) -> ScheduleOutcome:
        """Replay with arrivals at their recorded times and steps that take what they cost.

        A sequence that was aborted ends with as many tokens as it had; without any, at the time of its abort.
        """
        what_if = what_if or WhatIf()
        clock = _RecordedClock()
        engine = ReplayedEngine(what_if.apply(self.facts), clock, on_plan)
        began = clock.now = self.records[0].arrived / 1e6
        events = deque(sorted(_events(self.records), key=lambda event: event[1]))
        while events or engine.has_work:
            while events and events[0][1] <= clock.now:
                _, _, record, arrives = events.popleft()
                gives_up = bool(record.flags & ABORTED) and record.output == record.resumed
                if arrives:
                    priority = 0 if what_if.ignore_priorities else record.priority
                    output = math.inf if gives_up else record.output
                    engine.add(record, self._blocks.names_of(record), priority, output)
                elif gives_up:
                    engine.abort(record.number)
            if engine.has_work:
                plan = engine.schedule()
                clock.now += cost.seconds(plan)
                engine.collect(plan)
            if events and (engine.is_stuck or not engine.has_work):
                clock.now = max(clock.now, events[0][1])
            elif engine.has_work:
                _refuse_stuck(engine)
        return engine.finish(began)


class _RecordedClock:
    """Clock between recorded moments: steps between two of them took equally long."""

    def __init__(self, records: Sequence[ScheduleRecord] = ()) -> None:
        self.now = 0.0
        self.calls = 0
        self._moments = sorted((call, at) for call, at, _, _ in _events(records))
        self._place = 0

    def __call__(self) -> float:
        return self.now

    def time_at(self, calls: int) -> float:
        """Return when that many steps had been scheduled and applied."""
        moments = self._moments
        while self._place < len(moments) and moments[self._place][0] < calls:
            self._place += 1
        if self._place == len(moments):
            return self.now
        call, at = moments[self._place]
        before, since = moments[self._place - 1] if self._place else (0, self.now)
        part = (calls - before) / (call - before) if call > before else 1.0
        return max(self.now, since + part * (at - since))


def _events(records: Sequence[ScheduleRecord]) -> list[tuple[int, float, ScheduleRecord, bool]]:
    """Return (steps scheduled before, time, record, whether it arrives) of arrivals and ends, in order."""
    found = [(each.call, each.arrived / 1e6, each, True) for each in records]
    found += [(each.end_call, each.ended / 1e6, each, False) for each in records]
    return sorted(found, key=lambda event: (event[0], event[1], event[2].number, not event[3]))


def _refuse_stuck(engine: ReplayedEngine) -> None:
    if engine.is_stuck:
        raise EngineError("the recorded sequences cannot be replayed: no step can be planned any more")
