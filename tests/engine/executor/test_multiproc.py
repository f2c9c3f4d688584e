"""Rank 0 and the last stage over a real link, with runners that say when they work: two threads, no model."""

import socket
import threading

import pytest

from llmbox.engine.core.step import SampledToken, StepResult
from llmbox.engine.distributed.step_codec import Link
from llmbox.engine.errors import RankLost
from llmbox.engine.executor import watchdog
from llmbox.engine.executor.multiproc import AsyncMultiprocExecutor, SyncMultiprocExecutor
from llmbox.engine.executor.watchdog import WorkerWatchdog
from llmbox.engine.ipc.messages import TokenLogprobs
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.process.worker_main import serve_launches, serve_steps
from support.scheduling import make_request, make_scheduler

PATIENCE = 20.0
"""Seconds until a test gives up: none waits as long unless it fails."""


class OneOther:
    """Stands for `Crew`, with one worker."""

    def __init__(self, link, layout):
        self.layout = layout
        self._link = link

    def send(self, frame):
        self._link.send(frame.encode())

    def receive(self, rank):
        assert rank == 1
        return self._link.receive()

    def shut_down(self):
        self._link.close()

    def close(self):
        self.shut_down()


class Stage:
    """A runner that notes when it begins a step, and may not end it before something else has happened."""

    def __init__(self, result=None):
        self.began = [threading.Event() for _ in range(4)]
        self.waits_for = {}
        self.steps = 0
        self._result = result or (lambda plan: StepResult())

    def execute(self, plan):
        step, self.steps = self.steps, self.steps + 1
        self.began[step].set()
        if (event := self.waits_for.get(step)) is not None:
            assert event.wait(PATIENCE), "the other stage stood still"
        return self._result(plan)


def tokens(plan):
    return StepResult({row.request.request_id: SampledToken(7) for row in plan.rows})


class Stages:
    """Call it -> rank 0's runner over both."""

    def __init__(self):
        self.ended = []
        """What ended the last stage of each."""
        self._opened = []

    def __call__(self, first, last, make=SyncMultiprocExecutor, serve=serve_steps):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        runner = make(first, OneOther(Link(ours), ParallelLayout(1, 2)), WorkerWatchdog([]))
        thread = threading.Thread(target=self._serve, args=(Link(theirs), last, serve))
        thread.start()
        self._opened.append((runner, thread))
        return runner

    def _serve(self, link, last, serve):
        try:
            serve(link, last, answers=True)
        except Exception as error:  # noqa: BLE001 - looked at by the tests
            self.ended.append(type(error))
        link.close()

    def close(self):
        for runner, thread in self._opened:
            runner.close()
            thread.join(PATIENCE)
            assert not thread.is_alive()


@pytest.fixture
def two_stages():
    stages = Stages()
    yield stages
    stages.close()


def plans(count):
    """Of one row, each of another request."""
    scheduler = make_scheduler(token_budget=10)
    for number in range(count):
        scheduler.add(make_request(f"r{number}", 10))
    return [scheduler.schedule() for _ in range(count)]


def test_the_first_stage_begins_a_step_while_the_last_is_still_at_the_one_before(two_stages):
    first, last = Stage(), Stage(tokens)
    last.waits_for[0] = first.began[1]
    first.waits_for[1] = last.began[0]
    runner = two_stages(first, last)
    assert (runner.stages, runner.depth) == (2, 1)
    one, two = plans(2)
    handles = [runner.launch(one), runner.launch(two)]
    assert [runner.collect(handle) for handle in handles] == [tokens(one), tokens(two)]


def test_a_stage_goes_on_though_its_results_are_not_read_yet(two_stages):
    """Rank 0 is still in a launch, which ends when the last stage has taken its states."""
    entry = TokenLogprobs(token_id=1, logprob=-1.0, rank=1, top=[(n, -float(n)) for n in range(20)])
    large = StepResult(prompt_logprobs={"r0": [entry] * 4000})
    first, last = Stage(), Stage(lambda plan: large)
    first.waits_for[1] = last.began[1]
    runner = two_stages(first, last)
    handles = [runner.launch(plan) for plan in plans(2)]
    assert [runner.collect(handle) == large for handle in handles] == [True, True]


class Ahead:
    """A device; `launches[n]` is an event that the launch n waits for, `results[n]` is called before its
    result is there.
    """

    images = None

    depth = 2
    urgent_capture = next_capture = None

    def __init__(self, launches=None, results=None):
        self.launched = 0
        self._launches, self._results = launches or {}, results or {}

    def size_for(self, plan):
        return 0

    def launch_sized(self, plan, size):
        number, self.launched = self.launched, self.launched + 1
        if (event := self._launches.get(number)) is not None:
            assert event.wait(PATIENCE), "nothing came meanwhile"
        return Handle(plan, number)

    def collect(self, handle):
        if handle.number in self._results:
            self._results[handle.number]()
        return tokens(handle.plan)


class Handle:
    def __init__(self, plan, number):
        self.plan, self.number = plan, number

    def wait(self):
        return


def ahead(connect, last):
    """-> `AsyncMultiprocExecutor` over a first stage that never waits, and `last`."""
    return connect(Ahead(), last, AsyncMultiprocExecutor, serve_launches)


def test_a_result_does_not_wait_for_the_launch_of_a_later_step(two_stages):
    taken = threading.Event()
    runner = ahead(two_stages, Ahead(launches={1: taken}))
    one, two = plans(2)
    handles = [runner.launch(one), runner.launch(two)]
    assert runner.collect(handles[0]) == tokens(one)
    taken.set()
    assert runner.collect(handles[1]) == tokens(two)


def test_a_result_that_fails_ends_its_rank_and_the_wait_for_it(two_stages, monkeypatch):
    monkeypatch.setattr(watchdog, "_LOST_SECONDS", 0.1)  # threads: no process ends

    def lost():
        raise ValueError("the device is gone")

    runner = ahead(two_stages, Ahead(results={1: lost}))
    one, two = plans(2)
    handles = [runner.launch(one), runner.launch(two)]
    assert runner.collect(handles[0]) == tokens(one)
    with pytest.raises(RankLost):
        runner.collect(handles[1])
    two_stages.close()
    assert two_stages.ended == [ValueError], "what is told is what failed"


def test_one_stage_is_done_when_it_is_launched():
    """Its other ranks are told, and not asked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    runner = SyncMultiprocExecutor(
        Stage(tokens), OneOther(Link(ours), ParallelLayout(2, 1)), WorkerWatchdog([])
    )
    assert (runner.stages, runner.depth) == (1, 0)
    (plan,) = plans(1)
    assert runner.collect(runner.launch(plan)) == tokens(plan)
    assert Link(theirs).receive().kind == "step"
    assert not runner.prepare()
    runner.close()
    theirs.close()
