"""Choice between one engine and a pair of engines by what was measured, and the switch between them."""

import re
from dataclasses import replace

import pytest

from llmbox.app.engines.pair_switch import HOLD_S, WAIT_S, WINDOW_S, EnginePairPolicy
from llmbox.app.engines.step_times import Interference
from llmbox.app.errors import ApiError
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import EngineStats
from llmbox.engine.ipc.sequence_times import StepWork
from support.clock import Clock
from support.engines import assert_undisturbed, config, request, supervised, until
from support.fake_engine import write_model
from support.scheduling import INFO as SCHEDULED

ONE = replace(SCHEDULED, device="cpu", generates=True, token_budget=256, context_window=4096)
PAIR = replace(ONE, disaggregate=(1, 1))
UNEVEN = Interference(mixed_steps=100, mixed_seconds=10.0, decode_steps=1000, decode_seconds=20.0, rows=4400)
WORK = StepWork(steps=1100, seconds=30.0, prefill_seconds=10.0)
AUTO = EngineConfig(model_path="/m", name="m", auto_disaggregate=True, threads=2)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def judge(clock):
    judge = EnginePairPolicy(AUTO, clock)
    judge.begin()
    return judge


def after(steps, seconds, handed, rows=4):
    """Counters of a pair after so many steps of so many seconds, with these tokens handed over."""
    work = StepWork(steps=steps, seconds=steps * seconds, decode_rows=steps * rows)
    return EngineStats(work=work, handed_tokens=handed)


def test_prompts_that_hold_up_streams_make_a_pair(judge):
    wanted = judge.judge(UNEVEN, EngineStats(work=WORK), ONE)
    assert wanted.pair == (1, 1)
    assert wanted.reason == "steps with a prompt in them took 5.0 times as long (9.1% of the steps)"
    even = replace(UNEVEN, mixed_seconds=2.2)
    assert judge.judge(even, EngineStats(work=WORK), ONE) is None


def test_a_pair_whose_prompts_have_become_rare_makes_one_engine(judge, clock):
    judge.judge(UNEVEN, EngineStats(work=WORK), ONE)
    judge.begin()
    assert judge.judge(Interference(), after(4000, 0.03, 100), PAIR) is None, "too short a time"
    clock.now += WINDOW_S
    wanted = judge.judge(Interference(), after(4000, 0.03, 100), PAIR)
    assert wanted.pair is None
    assert wanted.reason == "prompts would be in 0.0% of the steps of one engine"


def test_a_pair_stays_while_prompts_come_and_is_judged_by_each_window(judge, clock):
    judge.judge(UNEVEN, EngineStats(work=WORK), ONE)
    judge.begin()
    clock.now += WINDOW_S
    assert judge.judge(Interference(), after(4000, 0.03, 80_000), PAIR) is None
    assert judge.judge(Interference(), after(8000, 0.03, 80_000), PAIR) is None, "a new window"
    clock.now += WINDOW_S
    assert judge.judge(Interference(), after(8000, 0.03, 80_000), PAIR).pair is None


def test_a_pair_that_is_slower_than_one_engine_beside_prompts_makes_one(judge, clock):
    judge.judge(UNEVEN, EngineStats(work=WORK), ONE)
    judge.begin()
    clock.now += WINDOW_S
    assert judge.judge(Interference(), after(4000, 0.099, 80_000), PAIR) is None
    clock.now += WINDOW_S
    assert judge.judge(Interference(), after(8000, 0.15, 160_000, rows=8), PAIR) is None, "of more streams"
    clock.now += WINDOW_S
    wanted = judge.judge(Interference(), after(16_000, 0.15, 320_000, rows=6), PAIR)
    assert wanted.pair is None
    assert wanted.reason == (
        "streams were slower than beside prompts: 150 ms a token, 100 ms beside prompts in one engine"
    )


def test_each_return_holds_the_next_pair_back_for_longer(judge, clock):
    assert judge.hold() == HOLD_S
    assert judge.judge(UNEVEN, EngineStats(work=WORK), ONE) is None
    clock.now += HOLD_S
    assert judge.judge(UNEVEN, EngineStats(work=WORK), ONE).pair == (1, 1)
    assert judge.hold() == 2 * HOLD_S


def auto_supervisor(tmp_path, clock, **options):
    """Supervisor of a fake engine that says it has two cores and what pair it is."""
    return supervised(tmp_path, supervisor={"clock": clock}, step_seconds=0.001, **options)


def set_auto(subject):
    subject.config = subject.admitted = replace(subject.config, auto_disaggregate=True, threads=2)
    subject.pair_switch._judge._config = subject.config


def measure_uneven(subject):
    """As if prompts had held up streams, in steps of before."""
    subject.queue.times.interference = replace(UNEVEN)


async def test_at_the_next_idle_moment_it_becomes_a_pair(tmp_path, clock):
    async with auto_supervisor(tmp_path, clock) as subject:
        set_auto(subject)
        switch = subject.pair_switch
        assert switch.describe().startswith("one engine: prompts hold up running requests too little")
        measure_uneven(subject)
        first = [subject.submit(request(number, 100)) for number in range(4)]
        await until(lambda: switch._wanted is not None or subject.info.disaggregate)
        await assert_undisturbed(first)
        second = [subject.submit(request(number, 100)) for number in range(10, 14)]
        await until(lambda: subject.info.disaggregate == (1, 1) and subject.state == "ready")
        await assert_undisturbed(second)
        assert subject.restarts == 0, "nobody died"
        assert subject.admitted.context == subject.info.context_window
        # Steps of the fake engine count as well: they take what the machine makes them take.
        assert re.match(
            r"a pair 1:1: steps with a prompt in them took \d\.\d times as long", switch.describe()
        )


async def test_without_an_idle_moment_open_requests_go_on_in_the_pair(tmp_path, clock):
    async with auto_supervisor(tmp_path, clock, hold_at=200) as subject:
        set_auto(subject)
        measure_uneven(subject)
        streams = [subject.submit(request(number, 300)) for number in range(4)]
        await until(lambda: subject.pair_switch._wanted is not None)
        assert "at the next moment without requests a pair 1:1" in subject.pair_switch.describe()
        clock.now += WAIT_S + 1
        await until(lambda: subject.info.disaggregate == (1, 1))
        (tmp_path / "fake" / "go").touch()
        await assert_undisturbed(streams)
        assert subject.resumed == 4


async def test_without_memory_it_stays_one_engine(tmp_path, clock):
    async with auto_supervisor(tmp_path, clock) as subject:
        set_auto(subject)
        asked = []

        async def refuse(wanted):
            asked.append(wanted)
            raise ApiError(400, "needs 4 GB and 3 GB are available", code="does_not_fit")

        subject.readmit = refuse
        measure_uneven(subject)
        await assert_undisturbed([subject.submit(request(number, 100)) for number in range(4)])
        await until(lambda: asked)
        await until(lambda: "needs 4 GB" in subject.pair_switch.describe())
        assert "one engine: other engines could not be started" in subject.pair_switch.describe()
        assert asked[0].disaggregate == (1, 1)
        await assert_undisturbed([subject.submit(request(20, 100))])
        assert (subject.info.disaggregate, len(asked)) == (None, 1)


async def test_a_pair_that_cannot_be_loaded_gives_way_to_the_engine_of_before(tmp_path, clock):
    async with auto_supervisor(tmp_path, clock) as subject:
        set_auto(subject)
        write_model(
            tmp_path / "fake", step_seconds=0.001, pair_error=("does_not_fit", "the pair is too large")
        )
        measure_uneven(subject)
        await assert_undisturbed([subject.submit(request(number, 100)) for number in range(4)])
        waiting = subject.submit(request(20, 100))
        await assert_undisturbed([waiting])
        await until(lambda: "the pair is too large" in subject.pair_switch.describe())
        await until(lambda: subject.state == "ready")
        await assert_undisturbed([subject.submit(request(21, 100))])
        assert (subject.info.disaggregate, subject.restarts) == (None, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 2}, "does not work with --tp 2"),
        ({"prefix_cache": False}, "does not work with --no-prefix-cache"),
        ({"threads": 1}, "needs two cores"),
    ],
)
async def test_a_model_that_cannot_be_a_pair_says_why(tmp_path, clock, options, words):
    async with auto_supervisor(tmp_path, clock) as subject:
        set_auto(subject)
        subject.config = replace(subject.config, **options)
        measure_uneven(subject)
        await assert_undisturbed([subject.submit(request(number, 100)) for number in range(4)])
        assert subject.pair_switch.describe() == f"one engine: a pair {words}" + (
            "" if "threads" in options else ": leave one of them out"
        )
        assert subject.info.disaggregate is None


async def test_without_auto_nothing_is_switched_or_said(tmp_path, clock):
    async with auto_supervisor(tmp_path, clock) as subject:
        measure_uneven(subject)
        await assert_undisturbed([subject.submit(request(number, 100)) for number in range(4)])
        assert subject.pair_switch.describe() == ""
        assert config(tmp_path).auto_disaggregate is False
        assert subject.info.disaggregate is None
