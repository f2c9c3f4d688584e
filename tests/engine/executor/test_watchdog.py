"""Ranks that end, stop or stand still are noticed; those that work or rest are left alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from llmbox.engine.errors import RankLost
from llmbox.engine.executor import watchdog as watch_module
from llmbox.engine.executor.watchdog import WorkerWatchdog
from llmbox.engine.executor.workers import Worker
from llmbox.engine.hardware.proc import ProcessState
from support.cli_box import PATIENCE, is_alive, until

TICK = 0.02


class Ends:
    def __init__(self):
        self.calls: list[tuple[str, bool]] = []
        self.called = threading.Event()

    def __call__(self, reason, *, from_outside):
        self.calls.append((reason, from_outside))
        self.called.set()


@pytest.fixture
def start():
    """A worker process that sleeps, or burns a core."""
    processes = []

    def begin(code="import time; time.sleep(3600)"):
        process = subprocess.Popen([sys.executable, "-S", "-c", code])
        processes.append(process)
        return Worker(len(processes), process, None)

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "outside", "words"),
    [(signal.SIGKILL, True, "rank 2 was killed by signal 9"), (signal.SIGTERM, False, "signal 15")],
)
def test_a_rank_that_dies_is_told_at_once_also_without_a_step(start, number, outside, words):
    ends, workers = Ends(), [start(), start()]
    watch = WorkerWatchdog(workers, ends, TICK)
    workers[1].process.send_signal(number)
    assert ends.called.wait(PATIENCE)
    ((reason, from_outside),) = ends.calls
    assert words in reason
    assert from_outside is outside
    watch.close()


def test_the_rank_that_died_first_is_told_not_those_that_followed(start):
    ends, workers = Ends(), [start(), start()]
    for worker, number in zip(workers, (signal.SIGTERM, signal.SIGKILL), strict=True):
        worker.process.send_signal(number)
        until(lambda pid=worker.process.pid: not is_alive(pid))
    watch = WorkerWatchdog(workers, ends, TICK)
    assert ends.called.wait(PATIENCE)
    assert ends.calls == [("rank 2 was killed by signal 9", True)]
    watch.close()


def test_a_lost_rank_whose_process_takes_long_to_end_is_waited_for(start):
    """Its socket is closed, and the step fails of that: the engine must end as the rank does, not before."""
    ends, worker = Ends(), start()
    watch = WorkerWatchdog([worker], ends)
    dying = threading.Timer(1.5, worker.process.kill)
    dying.start()
    with pytest.raises(RankLost), watch.guarding():
        raise RankLost("the other rank closed its end")
    assert ends.calls == [("rank 1 was killed by signal 9", True)]
    dying.join()
    watch.close()


def test_a_stopped_rank_is_told_while_a_step_waits_for_it(start):
    ends, workers = Ends(), [start("while True: pass"), start()]
    watch = WorkerWatchdog(workers, ends, TICK)
    workers[1].process.send_signal(signal.SIGSTOP)
    time.sleep(20 * TICK)
    assert not ends.calls, "nobody waits for it"
    with watch.step():
        assert ends.called.wait(PATIENCE)
    assert ends.calls == [("rank 2 was stopped", True)]
    watch.close()


def test_a_step_in_which_nobody_works_is_told(start, monkeypatch):
    monkeypatch.setattr(watch_module, "STILL_TICKS", 5)
    ends = Ends()
    watch = WorkerWatchdog([start()], ends, 0.2)
    with watch.step():
        assert ends.called.wait(PATIENCE)
    assert ends.calls == [("no rank has used the processor for a while in one step", False)]
    watch.close()


@pytest.mark.parametrize(("letter", "ends"), [("S", True), ("R", False), ("D", False)])
def test_a_rank_that_gets_no_core_is_not_one_that_stands_still(start, monkeypatch, letter, ends):
    """Others may have all of them for long."""
    monkeypatch.setattr(watch_module, "STILL_TICKS", 3)
    monkeypatch.setattr(watch_module, "read_state", lambda _: ProcessState(letter, 7))
    seen = Ends()
    watch = WorkerWatchdog([start()], seen, TICK)
    with watch.step():
        assert seen.called.wait(PATIENCE if ends else 20 * TICK) == ends
    watch.close()


@pytest.mark.parametrize(("each", "ends"), [(1, True), (10, False)])
def test_ranks_whose_libraries_look_around_stand_still(start, monkeypatch, each, ends):
    """NCCL's threads do, whose own watchdog does not see what graphs exchange."""
    used = iter(range(0, 1 << 20, each))
    monkeypatch.setattr(watch_module, "STILL_TICKS", 3)
    monkeypatch.setattr(watch_module, "read_state", lambda _: ProcessState("S", next(used)))
    seen = Ends()
    watch = WorkerWatchdog([start()], seen, TICK)
    with watch.step():
        seen.called.wait(PATIENCE if ends else 20 * TICK)
    assert seen.calls == [("no rank has used the processor for a while in one step", False)] * ends
    watch.close()


def test_long_steps_of_work_and_rest_between_steps_are_fine(start, monkeypatch):
    monkeypatch.setattr(watch_module, "STILL_TICKS", 4)
    ends = Ends()
    watch = WorkerWatchdog([start("while True: pass")], ends, 0.1)
    with watch.step():
        time.sleep(1.0)
    time.sleep(0.6)
    for _ in range(50):
        with watch.step():
            time.sleep(0.002)
    watch.close()
    assert not ends.calls


def test_it_sleeps_when_nothing_runs(start):
    watch = WorkerWatchdog([start()], Ends(), TICK)
    with watch.step():
        time.sleep(5 * TICK)

    def sleeps() -> bool:
        before = _switches(watch)
        time.sleep(20 * TICK)
        return _switches(watch) == before

    until(sleeps)  # it may be late to see that the step is over
    watch.close()


def test_workers_that_end_after_close_are_meant_to(start):
    ends, worker = Ends(), start()
    watch = WorkerWatchdog([worker], ends, TICK)
    watch.close()
    watch.close()
    worker.process.kill()
    worker.process.wait()
    assert not ends.calls


def _switches(watch):
    """How often its thread has given the processor away."""
    status = Path(f"/proc/{os.getpid()}/task/{watch._thread.native_id}/status")
    return [line for line in status.read_text().splitlines() if "ctxt_switches" in line]
