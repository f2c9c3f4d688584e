"""Times of sequences: they add up, and say with whom steps were shared."""

from dataclasses import astuple

import pytest

from llmbox.engine.core.speculation.proposer import Proposals
from support.clock import Clock
from support.scheduling import FakeEngine, make_request

STEP, TOKEN, GAP = 1.0, 0.125, 0.5
"""Seconds of a step, of each of its tokens, and between two steps."""


class TimedEngine(FakeEngine):
    """An engine whose clock is moved by its steps, and by the time between them."""

    def __init__(self, *, depth=0, **options):
        self.clock = Clock()
        super().__init__(clock=self.clock, depth=depth, **options)
        self.engine._clock = self.clock
        self.times = {}
        self.steps = 0.0
        name = "collect" if depth else "execute"
        compute = getattr(self.runner, name)

        def timed(work):
            plan = work[0] if depth else work
            seconds = STEP + TOKEN * plan.num_tokens
            self.clock.now += seconds
            self.steps += seconds
            return compute(work)

        setattr(self.runner, name, timed)

    def step(self):
        self.clock.now += GAP
        made = self.engine.step()
        self.times |= made.times
        for output in made.outputs:
            self._take(output)


def inside(times):
    return sum(sum(astuple(each)[:5]) for each in (times.prefill, times.recompute, times.decode))


def assert_adds_up(engine):
    for times in engine.times.values():
        assert times.queued + times.preempted + inside(times) == pytest.approx(
            times.ended_at - times.arrived_at
        )
        for phase in (times.prefill, times.recompute, times.decode):
            assert min(astuple(phase)) >= -1e-9


def own(engine):
    phases = [each for t in engine.times.values() for each in (t.prefill, t.recompute, t.decode)]
    return sum(phase.own for phase in phases)


def test_one_sequence_alone():
    engine = TimedEngine(token_budget=8)
    engine.add(make_request("a", 20, max_tokens=4))
    engine.run()
    times = engine.times["a"]
    assert times.queued == GAP
    assert times.prefill.steps == 3  # 8 + 8 + 4 tokens
    assert times.prefill.own == 3 * STEP + 20 * TOKEN
    assert times.decode.steps == 3
    assert times.decode.own == 3 * (STEP + TOKEN)
    assert times.prefill.between == 2 * GAP
    assert times.decode.between == 3 * GAP
    assert times.prefill.mixed == times.decode.mixed == times.decode.others == 0
    assert_adds_up(engine)


def test_counters_of_steps_with_and_without_prompts():
    engine = TimedEngine(token_budget=8)
    engine.add(make_request("a", 4, max_tokens=6))
    engine.step()
    engine.add(make_request("b", 20, max_tokens=2))
    engine.step()
    stats = engine.engine.stats()
    assert stats.prefill_done == 7
    assert (stats.work.steps, stats.work.prefill_steps) == (2, 2)
    assert (stats.work.decode_rows, stats.work.prefill_tokens) == (1, 4 + 7)
    engine.run()
    stats = engine.engine.stats()
    assert stats.prefill_done == 0
    assert stats.work.prefill_tokens == 24
    assert stats.work.decode_rows == stats.output_tokens - 2
    assert stats.work.seconds == engine.steps
    assert stats.work.prefill_seconds == stats.work.prefill_steps * STEP + TOKEN * (24 + 3)


def test_a_prompt_in_the_steps_of_an_answer():
    engine = TimedEngine(token_budget=8)
    engine.add(make_request("a", 4, max_tokens=6))
    engine.step()
    engine.add(make_request("b", 14, max_tokens=2))
    engine.run()
    a, b = engine.times["a"].decode, engine.times["b"]
    # Two steps of 1 + 7 tokens, one of two answers, two of a alone.
    assert (a.steps, a.mixed, a.others) == (5, 2, 3)
    mixed, both, alone = STEP + 8 * TOKEN, STEP + 2 * TOKEN, STEP + TOKEN
    assert a.own == pytest.approx(2 * mixed / 8 + both / 2 + 2 * alone)
    assert a.prompts == pytest.approx(2 * mixed * 7 / 8)
    assert a.decoding == pytest.approx(both / 2)
    assert b.prefill.own == pytest.approx(2 * mixed * 7 / 8)
    assert b.prefill.decoding == pytest.approx(2 * mixed / 8)
    assert (b.prefill.prompts, b.prefill.mixed, b.prefill.others) == (0.0, 0, 2)
    assert own(engine) == pytest.approx(engine.steps)
    assert_adds_up(engine)


def test_preempted_sequence_is_told_what_was_computed_again():
    engine = TimedEngine(num_blocks=8, token_budget=64, cache=False)
    engine.add(make_request("a", 12, max_tokens=16))
    engine.add(make_request("b", 12, max_tokens=16))
    engine.run()
    first, second = engine.times["a"], engine.times["b"]
    assert (first.preemptions, first.preempted, first.recompute.steps) == (0, 0.0, 0)
    assert second.preemptions >= 1
    assert second.preempted > 0
    assert second.recompute.own > 12 * TOKEN
    assert own(engine) == pytest.approx(engine.steps)
    assert_adds_up(engine)


def test_answers_that_an_express_step_leaves_out():
    engine = TimedEngine(token_budget=8)
    engine.add(make_request("a", 4, max_tokens=6))
    engine.step()
    engine.add(make_request("premium", 4, max_tokens=1, priority=-1))
    engine.run()
    decode = engine.times["a"].decode
    assert decode.absent == STEP + 4 * TOKEN
    assert decode.steps == 5
    assert own(engine) == pytest.approx(engine.steps)
    assert_adds_up(engine)


def test_aborted_sequence_has_times_too():
    engine = TimedEngine(max_running=1)
    engine.add(make_request("a", 4, max_tokens=8))
    engine.add(make_request("b", 4, max_tokens=8))
    engine.step()
    engine.abort("a")
    engine.abort("b")
    times = engine.engine.take_times()
    assert times["a"].prefill.steps == 1
    assert times["b"].queued == times["b"].ended_at - times["b"].arrived_at > 0
    assert engine.engine.take_times() == {}


@pytest.mark.parametrize("options", [{"depth": 1}, {"depth": 2, "stages": 2}, {"depth": 1, "num_blocks": 12}])
def test_times_add_up_where_steps_overlap(options):
    engine = TimedEngine(token_budget=8, **options)
    for number, name in enumerate("abcdef"):
        engine.add(make_request(name, 5 + 3 * number, max_tokens=4 + number, priority=number % 3 - 1))
        engine.step()
    engine.run()
    assert len(engine.times) == 6
    assert_adds_up(engine)


class WrongProposer:
    method = "ngram"

    def propose(self, wanted):
        return Proposals([[0] * most for _, most in wanted])


def test_drafts_are_rows_of_the_answer():
    engine = TimedEngine(proposers=[WrongProposer()], draft_rows=8)
    engine.add(make_request("a", [1, 2, 3, 4] * 4, max_tokens=12))
    engine.run()
    times = engine.times["a"]
    assert times.decode.prompts == pytest.approx(times.decode.decoding) == 0.0
    assert engine.engine.stats().draft_tokens > 0
    assert own(engine) == pytest.approx(engine.steps)
    assert_adds_up(engine)
