from dataclasses import replace

import pytest

from llmbox.app.engines.step_times import Interference, MeasuredSteps, StepCurve, recommend_pair
from llmbox.engine.ipc.messages import EngineStats
from llmbox.engine.ipc.sequence_times import StepWork
from support.clock import Clock
from support.scheduling import INFO as SCHEDULED


def curve(clock=None, **seconds):
    made = StepCurve(clock or Clock())
    for size, each in seconds.items():
        made.add(int(size[1:]), each)
    return made


def test_a_curve_is_a_line_between_measured_sizes():
    measured = curve(_4=1.0, _16=2.0)
    assert measured.predict(1) == 1.0
    assert measured.predict(10) == pytest.approx(1.5)
    assert measured.predict(16) == 2.0


def test_above_the_largest_size_it_goes_on_as_from_half_of_it():
    measured = curve(_4=1.0, _8=2.0, _15=3.5, _16=3.0)  # 15 was measured on a busy machine
    assert measured.predict(32) == pytest.approx(3.25 + 16 * (3.25 - 2.0) / 8)


def test_with_one_size_it_is_flat_to_twice_that_and_proportional_from_there():
    measured = curve(_8=2.0)
    assert measured.predict(16) == 2.0
    assert measured.predict(32) == 4.0


def test_a_larger_step_is_never_predicted_to_be_faster():
    measured = curve(_8=3.0, _32=1.0)
    assert measured.predict(8) == measured.predict(32) == 2.0
    for _ in range(15):
        measured.add(32, 1.0)
    assert measured.predict(32) == measured.predict(8) == pytest.approx(1.0 + 2.0 / 17)


def test_the_usual_steps_of_a_size_count_and_not_the_slow_ones_among_them():
    measured = curve(_100=30.0)  # the first one after a load
    assert measured.predict(100) == 30.0
    measured.add(101, 3.0)
    assert measured.predict(101) == 3.0
    for seconds in (2.0, 1.0, 40.0, 3.0):
        measured.add(100, seconds)
    assert measured.predict(100) == pytest.approx(3.0)
    for _ in range(12):
        measured.add(100, 5.0)
    assert measured.predict(100) == pytest.approx(5.0), "a machine that has become slower is noticed"


def test_old_times_count_for_half_until_they_are_measured_again():
    clock = Clock()
    measured = curve(clock, _8=4.0)
    clock.now += 100
    assert measured.predict(8) == 4.0
    clock.now += 80
    assert measured.predict(8) == pytest.approx(2.0)
    clock.now += 10_000
    assert measured.predict(8) == 2.0
    measured.add(8, 4.0)
    assert measured.predict(8) == 4.0


class Steps:
    """Counters of an engine, step by step."""

    def __init__(self):
        self.times = MeasuredSteps(Clock())
        self.stats = EngineStats()

    def run(self, seconds, rows=0, prompts=0, drawn=None, steps=1):
        old = self.stats.work
        now = EngineStats(
            output_tokens=self.stats.output_tokens + (rows if drawn is None else drawn),
            work=StepWork(
                steps=old.steps + steps,
                seconds=old.seconds + seconds,
                decode_rows=old.decode_rows + rows,
                prefill_tokens=old.prefill_tokens + prompts,
            ),
        )
        self.times.observe(self.stats, now)
        self.stats = now


def test_steps_with_and_without_prompts_are_told_apart():
    steps = Steps()
    assert not steps.times.is_measured
    steps.run(0.010, rows=4)
    steps.run(0.050, rows=4, prompts=60)
    steps.run(0.040, prompts=64)  # nobody waited in it
    assert steps.times.predict_decode(4) == pytest.approx(0.010)
    assert steps.times.predict_mixed(4, 60) == pytest.approx(0.040)
    assert steps.times.interference.ratio == pytest.approx(5.0)
    assert steps.times.interference.share == 0.5
    assert steps.times.extra == pytest.approx(0.040 / 64)


def test_readings_between_which_no_step_or_several_lie_teach_nothing():
    steps = Steps()
    steps.run(0.0, steps=0)
    steps.run(9.0, rows=1, steps=2)
    assert not steps.times.is_measured
    steps.stats = EngineStats(work=StepWork(steps=100))
    steps.run(0.01, rows=1, steps=-99)  # a new engine
    assert not steps.times.is_measured


def test_prompts_take_as_many_steps_as_the_budget_requires():
    steps = Steps()
    steps.run(0.010, rows=2)
    steps.run(0.020, prompts=16)
    steps.run(0.100, prompts=100)
    whole, rest = steps.times.predict_mixed(2, 62), steps.times.predict_mixed(2, 14)
    assert steps.times.predict_prompts(138, 2, 64) == pytest.approx(2 * whole + rest)
    assert steps.times.predict_prompts(0, 2, 64) == 0.0


def test_accepted_drafts_make_tokens_cheaper():
    steps = Steps()
    for _ in range(400):
        steps.run(0.01, rows=2, drawn=6)
    assert steps.times.tokens_per_row == pytest.approx(3.0, rel=0.01)


INFO = replace(SCHEDULED, device="cpu", generates=True)


@pytest.mark.parametrize(
    ("mixed", "prefill_seconds", "facts", "cores", "pair"),
    [
        ((100, 10.0), 5.0, {}, 8, (2, 6)),  # a mixed step takes 10 times as long; prompts took a quarter
        ((100, 10.0), 0.1, {}, 8, (1, 7)),
        ((100, 10.0), 19.9, {}, 8, (7, 1)),
        ((100, 1.15), 5.0, {}, 8, None),  # even enough
        ((10, 10.0), 5.0, {}, 8, None),  # too few
        ((100, 10.0), 5.0, {}, 1, None),
        ((100, 10.0), 5.0, {"device": "cuda:0"}, 8, None),
        ((100, 10.0), 5.0, {"tp": 2}, 8, None),
        ((100, 10.0), 5.0, {"disaggregate": (1, 1)}, 8, None),
    ],
)
def test_a_pair_of_engines_is_recommended_by_what_was_measured(mixed, prefill_seconds, facts, cores, pair):
    measured = Interference(
        mixed_steps=mixed[0], mixed_seconds=mixed[1], decode_steps=1000, decode_seconds=10.0
    )
    work = StepWork(steps=2000, seconds=20.0, prefill_seconds=prefill_seconds)
    assert recommend_pair(measured, work, replace(INFO, **facts), cores) == pair


def test_what_was_long_ago_counts_for_less():
    measured = Interference()
    for _ in range(20_000):
        measured.add(0.01, 2, is_mixed=False)
    for _ in range(2_000):
        measured.add(0.05, 2, is_mixed=True)
    assert (measured.steps, measured.mixed_steps) == (12_000, 2_000)
    assert measured.ratio == pytest.approx(5.0)
    assert measured.rows == 2 * 12_000


def test_prompts_too_rare_for_a_percentile_recommend_nothing():
    measured = Interference(mixed_steps=100, mixed_seconds=10.0, decode_steps=100_000, decode_seconds=1000.0)
    assert recommend_pair(measured, StepWork(steps=1, seconds=1.0), INFO, 8) is None
