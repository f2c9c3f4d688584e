"""A replay of recorded sequences has the engine's steps: rows, copies, blocks, evictions, preemptions."""

import random
from dataclasses import dataclass, field

import pytest

from llmbox.app.store.record import encode_schedule
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.replay.replayed_engine import percentiles
from llmbox.engine.core.replay.schedule_replay import LinearStepCost, ScheduleReplay, WhatIf
from llmbox.engine.core.step import SyncExecutor
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.ipc.sequence_times import (
    DRAFTED,
    LENGTHENED,
    MOST_BYTES,
    EngineFacts,
    decode_schedule,
)
from llmbox.engine.sampling_params import SamplingParams
from support.clock import Clock
from support.fake_runner import FakeOverlappingRunner, FakeRunner
from support.scheduling import INFO, make_scheduler

COST = LinearStepCost(step_s=0.01, prompt_token_s=0.001, row_s=0.002, kv_token_s=0.00001)


def described(plan, number_of):
    rows = [(row.start, row.num_tokens, row.samples) for row in plan.rows]
    tables = [(number_of[row.request.request_id], *row.request.block_table) for row in plan.rows]
    return rows, tables, list(plan.copies)


@dataclass
class RecordedEngine:
    """A real engine over a runner without a model, whose steps take what `COST` says."""

    config: dict = field(default_factory=dict)
    depth: int = 0
    cost: LinearStepCost = COST

    def __post_init__(self):
        self.clock = Clock()
        options = {"num_blocks": 40, "block_size": 4, **self.config}
        self.scheduler = make_scheduler(clock=self.clock, **options)
        if self.depth:
            runner = FakeOverlappingRunner(options["num_blocks"], options["block_size"], self.depth)
        else:
            runner = SyncExecutor(FakeRunner(options["num_blocks"], options["block_size"]))
        self.engine = Engine(self.scheduler, runner, INFO, self.clock)
        self.plans, self.records, self.numbers, self.answers = [], [], {}, {}
        launch = runner.launch

        def note(plan):
            self.plans.append(described(plan, self.numbers))
            self.clock.now += self.cost.seconds(plan)
            return launch(plan)

        runner.launch = note

    def add(self, name, prompt, *, tenant="", priority=0, namespace="", fork_of=None, **params):
        self.clock.now += 1e-5
        self.numbers[name] = len(self.numbers)
        message = AddRequest(
            request_id=name,
            prompt_ids=prompt,
            params=SamplingParams(**{"max_tokens": 8, **params}),
            priority=priority,
            tenant=tenant,
            cache_namespace=namespace,
            fork_of=fork_of,
        )
        assert self.engine.add(message) is None
        self.answers[name] = list(prompt)

    def abort(self, name):
        self.clock.now += 1e-5
        self.engine.abort(name)

    def step(self):
        told = self.engine.step()
        for output in told.outputs:
            self.answers[output.request_id] += output.token_ids
        self.take(told.times)

    def take(self, times):
        self.records += [each.schedule for each in times.values()]

    def finish(self):
        while self.engine.has_work:
            self.step()
        self.take(self.engine.take_times())
        return self.records


def play(
    engine, seed, *, count=60, priorities=(0,), tenants=("",), aborts=0.1, gap=0.0, longest=30, **params
):
    """Random traffic: chats that go on, shared beginnings, several choices, clients that leave."""
    draw = random.Random(seed)
    shared = [[draw.randrange(1000) for _ in range(40)] for _ in range(3)]
    done = 0
    while done < count or engine.engine.has_work:
        while done < count and draw.random() < 0.4:
            name, kind = f"s{done}", draw.random()
            prompt = [draw.randrange(1000) for _ in range(draw.randrange(1, 50))]
            options = {"priority": draw.choice(priorities), "tenant": draw.choice(tenants)}
            if kind < 0.3:
                prompt = draw.choice(shared)[: draw.randrange(1, 41)] + prompt[:9]
            elif kind < 0.5 and engine.answers:
                prompt = draw.choice(list(engine.answers.values()))[:50] + prompt[:9]
            options |= params
            engine.add(name, prompt, max_tokens=draw.randrange(1, longest), **options)
            done += 1
            if draw.random() < 0.1:
                engine.add(f"s{done}", prompt, max_tokens=9, fork_of=name, **options)
                done += 1
        if engine.answers and draw.random() < aborts:
            engine.abort(draw.choice(list(engine.answers)))
        if engine.engine.has_work:
            engine.step()
        else:
            engine.clock.now += draw.random() * gap
    return engine.finish()


def replayed(records, **options):
    plans, replay = [], ScheduleReplay(records)
    numbers = {str(record.number): record.number for record in records}
    followed = replay.follow(lambda plan: plans.append(described(plan, numbers)))
    return plans, followed, replay


CONFIGS = {
    "plain": {},
    "no cache": {"cache": False},
    "few blocks": {"num_blocks": 24},
    "small budget": {"token_budget": 9},
    "whole prompts": {"chunked_prefill": False},
    "static": {"batching": "static", "num_blocks": 40, "context": 80, "max_running": 2},
    "share": {"premium_share": 0.2, "watermark": 0.05},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_same_steps(name, depth, seed):
    engine = RecordedEngine(CONFIGS[name], 0 if name == "static" else depth)
    long = {"static": 30}.get(name, 60)
    records = play(engine, seed, count=long, priorities=(-1, 0, 0, 3), tenants=("a", "b", "c"))
    plans, followed, _ = replayed(records)
    assert plans == engine.plans
    outcome, scheduler = followed.outcome, engine.scheduler
    assert outcome.evictions == scheduler.pool.evictions
    assert outcome.preemptions == scheduler.active.preemptions
    assert outcome.prefix_hits == scheduler.kv_cache.prefix_hits
    assert outcome.output_tokens == scheduler.output_tokens
    assert followed.same_ends == followed.ends > 0


@pytest.mark.parametrize("config", [{}, {"num_blocks": 24}, {"cache": False}, {"premium_share": 0.2}])
@pytest.mark.parametrize("seed", range(3))
def test_same_steps_with_drafts(config, seed):
    """As many draft tokens, as many of them accepted, and the blocks that they took ahead of need."""
    engine = RecordedEngine({"draft_rows": 9, **config})
    records = play(
        engine, seed, priorities=(-1, 0, 0, 3), tenants=("a", "b"), longest=36, aborts=0.05, temperature=0.0
    )
    stats = engine.scheduler.drafting.stats()
    assert stats["draft_tokens"] > stats["accepted_tokens"] > 50
    plans, followed, replay = replayed(records)
    assert plans == engine.plans
    outcome, scheduler = followed.outcome, engine.scheduler
    assert outcome.evictions == scheduler.pool.evictions
    assert outcome.preemptions == scheduler.active.preemptions
    assert outcome.output_tokens == scheduler.output_tokens
    assert followed.same_ends == followed.ends > 0
    assert not any(record.flags & DRAFTED for record in records)
    assert sum(bool(record.drafts) for record in records) > 10
    assert max(len(encode_schedule(record)) for record in records) <= MOST_BYTES
    again = [decode_schedule(encode_schedule(record)) for record in records]
    assert replayed(again)[0] == plans
    assert replay.simulate(COST).output_tokens == scheduler.output_tokens


LONG = {"plain": {}, "few blocks": {"num_blocks": 26}, "no cache": {"cache": False}}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_same_steps_across_the_original_context_of_longrope(name, depth, seed):
    """Sequences that outgrow it lose their blocks and are computed again; only blocks of one set of factors
    are shared.
    """
    engine = RecordedEngine({"short_context": 38, **LONG[name]}, depth)
    records = play(engine, seed, priorities=(-1, 0, 3), tenants=("a", "b"), longest=36, aborts=0.05)
    grown = [record for record in records if record.flags & LENGTHENED]
    assert len(grown) > 5
    assert sum(record.prompt > 38 for record in records) > 3
    if name != "no cache":
        assert any(record.short_shared for record in grown), "some began as earlier ones"
        assert any(record.shared for record in records if record.prompt > 38)
    again = [decode_schedule(encode_schedule(record)) for record in records]
    plans, followed, _ = replayed(again)
    assert plans == engine.plans
    outcome, scheduler = followed.outcome, engine.scheduler
    assert outcome.evictions == scheduler.pool.evictions
    assert outcome.preemptions == scheduler.active.preemptions
    assert outcome.prefix_hits == scheduler.kv_cache.prefix_hits
    assert outcome.output_tokens == scheduler.output_tokens
    assert followed.same_ends == followed.ends > 0


def test_one_set_of_factors_computes_less():
    """A replay without the original context has no second computation of these sequences."""
    engine = RecordedEngine({"short_context": 46, "num_blocks": 200})
    for number in range(4):
        engine.add(f"s{number}", list(range(100 * number, 100 * number + 40)), max_tokens=20)
    records = engine.finish()
    plans, followed, _ = replayed(records)
    assert plans == engine.plans
    other = [each._replace(facts=each.facts._replace(short_context=0)) for each in records]
    assert followed.outcome.tokens == replayed(other)[1].outcome.tokens + 4 * 46


def test_the_traffic_of_these_tests_evicts_preempts_and_shares():
    engine = RecordedEngine({"num_blocks": 24})
    records = play(engine, 0, priorities=(-1, 0, 0, 3), tenants=("a", "b", "c"))
    assert engine.scheduler.pool.evictions > 20
    assert engine.scheduler.active.preemptions > 5
    assert engine.scheduler.kv_cache.prefix_hits > 50
    assert {record.fork for record in records} != {-1}
    assert any(record.flags for record in records)


@pytest.mark.parametrize("seed", range(3))
def test_aged_requests_overtake_as_they_did(seed):
    slow = LinearStepCost(step_s=0.5, prompt_token_s=0.01, row_s=0.0, kv_token_s=0.0)
    engine = RecordedEngine({"max_running": 2, "token_budget": 8, "ageing_seconds": 4.0}, cost=slow)
    records = play(engine, seed, priorities=(0, 1, 2), tenants=("a", "b"), aborts=0.0)
    plans, _, _ = replayed(records)
    assert engine.clock.now > 1100, "much longer than the ageing"
    assert plans == engine.plans


def test_the_cost_of_a_step_is_found_again():
    engine = RecordedEngine()
    records = play(engine, 1, count=200, gap=1.0)
    _, followed, _ = replayed(records)
    cost = followed.cost
    assert cost.error < 0.02
    assert cost.prompt_token_s == pytest.approx(COST.prompt_token_s, rel=0.1)
    assert cost.intervals > 100


def test_a_simulation_takes_as_long_as_the_engine_took():
    engine = RecordedEngine({"num_blocks": 24})
    records = play(engine, 2, tenants=("a", "b"), aborts=0.0, gap=0.5)
    replay = ScheduleReplay(records)
    outcome = replay.simulate(COST)
    assert outcome.output_tokens == engine.scheduler.output_tokens
    assert outcome.steps == pytest.approx(len(engine.plans), rel=0.05)
    assert outcome.span_s == pytest.approx(replay.follow().outcome.span_s, rel=0.05)


def test_twice_the_blocks_preempt_and_evict_less():
    engine = RecordedEngine({"num_blocks": 24})
    records = play(engine, 3, count=120, aborts=0.0)
    replay = ScheduleReplay(records)
    cost = replay.follow().cost
    as_it_was, more = replay.simulate(cost), replay.simulate(cost, WhatIf(block_factor=100.0))
    assert as_it_was.preemptions > more.preemptions == 0
    assert as_it_was.evictions > more.evictions == 0
    assert more.output_tokens == as_it_was.output_tokens
    assert more.queue_s[0] <= as_it_was.queue_s[0]


def test_a_budget_that_is_tried_is_that_of_all_steps():
    facts = EngineFacts(
        context=4096, max_running=8, token_budget=256, num_blocks=100, block_size=16, mixed_budget=64
    )
    assert WhatIf().apply(facts) == facts
    assert WhatIf(token_budget=128).apply(facts).mixed_budget == 0
    assert WhatIf(max_running=100).apply(facts).mixed_budget == 100


def test_limits_that_some_sequences_exceed():
    engine = RecordedEngine()
    records = play(engine, 4, aborts=0.0)
    replay = ScheduleReplay(records)
    outcome = replay.simulate(COST, WhatIf(num_blocks=12))
    assert 0 < outcome.refused < outcome.requests == len(records)


def test_without_priorities_a_premium_request_waits_its_turn():
    engine = RecordedEngine({"max_running": 1, "num_blocks": 100})
    for number in range(6):
        engine.add(f"s{number}", list(range(100 * number, 100 * number + 20)), max_tokens=20)
    engine.step()
    engine.add("premium", [1, 2, 3], priority=-1, max_tokens=2)
    replay = ScheduleReplay(engine.finish())
    order = {}

    def first_steps(name):
        seen = order.setdefault(name, [])
        return lambda plan: seen.extend(
            each.request.request_id for each in plan.rows if each.request.request_id not in seen
        )

    replay.simulate(COST, on_plan=first_steps("as it was"))
    replay.simulate(COST, WhatIf(ignore_priorities=True), first_steps("equal"))
    assert order["as it was"].index("6") == 1
    assert order["equal"].index("6") == 6


def test_records_with_holes_are_replayed_all_the_same():
    engine = RecordedEngine()
    records = play(engine, 5)
    kept = [record for record in records if record.number % 3]
    followed = ScheduleReplay(kept).follow()
    assert followed.outcome.requests == len(kept)
    assert followed.outcome.output_tokens > 0


def test_pooling_and_prompt_logprobs():
    engine = RecordedEngine()
    engine.add("a", list(range(90)), prompt_logprobs=0)
    engine.step()
    engine.add("b", list(range(90)))
    records = engine.finish()
    plans, _, _ = replayed(records)
    assert plans == engine.plans


def test_percentiles():
    assert percentiles([]) == []
    assert percentiles([float(value) for value in range(1, 101)]) == [50.0, 95.0, 99.0, 100.0]
