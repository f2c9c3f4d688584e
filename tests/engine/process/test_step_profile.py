"""Profiles of steps: exclusive times that add up, and an engine that is left as it was."""

import socket

import pytest

from llmbox.engine.ipc.channel import Channel
from llmbox.engine.process import step_profile
from llmbox.engine.process.step_profile import (
    BATCHES,
    DEVICE,
    ENGINE,
    FORWARD,
    HEAD,
    IDLE,
    MESSAGES,
    REST,
    SAMPLER,
    SCHEDULER,
    StepProfiler,
)
from support.late_device import device_engine
from support.real_engines import ask, load, run
from support.scheduling import FakeEngine, make_request
from support.tiny_models import make_tiny_model


class Clock:
    """A clock that moves by one at every look."""

    def __init__(self):
        self.now = 0

    def perf_counter(self):
        self.now += 1
        return float(self.now)

    monotonic = perf_counter


@pytest.fixture
def channel():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(theirs)


class Slow:
    def outer(self):
        return self.inner()

    def inner(self):
        return 7


def test_a_moment_counts_for_the_innermost_timed_method(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_profile, "time", clock)
    slow, timers = Slow(), step_profile.Timers(float)
    timers.put_before(slow.outer, "outer")
    timers.put_before(slow.inner, lambda: "inner")
    assert slow.outer() == 7
    timers.take_away()
    assert timers.seconds == {REST: 2.0, "outer": 2.0, "inner": 1.0}
    assert vars(slow) == {}


def test_a_profile_adds_up_and_leaves_no_trace(channel):
    fake = FakeEngine()
    engine = fake.engine
    before = [dict(vars(each)) for each in (channel, engine, engine.scheduler, engine.executor)]
    profiler = StepProfiler(engine, channel)
    assert profiler.start(60.0).is_on
    fake.add(make_request("a", 5, max_tokens=4))
    while engine.has_work:
        channel.receive(block=False)
        engine.step()
    found = profiler.stop()
    assert (found.is_on, found.steps) == (False, 4)
    assert found.tokens == 5 + 4
    assert {MESSAGES, SCHEDULER, "engine", "batch building"} <= set(found.spans)
    assert IDLE not in found.spans
    assert HEAD not in found.spans
    assert sum(found.spans.values()) == pytest.approx(found.seconds)
    after = [set(vars(each)) for each in (channel, engine, engine.scheduler, engine.executor)]
    assert after == [set(each) for each in before]
    assert profiler.stop() is found


def test_a_profile_whose_caller_is_gone_ends_by_itself(channel, monkeypatch):
    engine = FakeEngine().engine
    profiler = StepProfiler(engine, channel)
    profiler.start(1e9)
    profiler.end_if_late()
    assert "step" in vars(engine)
    monkeypatch.setattr(step_profile.time, "monotonic", lambda: float("inf"))
    profiler.end_if_late()
    assert "step" not in vars(engine)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.mark.parametrize("make", [load, device_engine])
def test_every_part_of_a_step_is_timed(model, make, channel):
    engine = make(model)
    profiler = StepProfiler(engine, channel)
    profiler.start(60.0)
    channel.receive(block=False)
    run(engine, [ask("a", range(5, 30), 4), ask("b", range(5, 20), 4, temperature=1.0)])
    found = profiler.stop()
    parts = {MESSAGES, ENGINE, SCHEDULER, BATCHES, DEVICE, FORWARD, HEAD, SAMPLER}
    assert found.spans.keys() == {REST, *parts}
    assert all(spent > 0 for spent in found.spans.values())


def test_the_head_runs_by_itself_while_it_is_timed(model, channel):
    engine = load(model)
    head = engine.executor.profiled().model
    profiler = StepProfiler(engine, channel)
    for _ in range(2):
        profiler.start(60.0)
        assert head.times_head
    profiler.stop()
    assert not head.times_head
