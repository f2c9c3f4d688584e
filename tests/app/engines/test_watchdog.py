"""Ticks by hand: who is given up, after how many, and who is not."""

import os
import signal
import subprocess
import sys

import pytest

from llmbox.app.engines import restart_policy
from llmbox.app.engines.restart_policy import Watchdog, WatchLimits, load_work, processor_seconds
from llmbox.engine.hardware.proc import family_of, waits_for_file_lock
from support.cli_box import until

LIMITS = WatchLimits(tick=2.5, unready_ticks=2, stuck_ticks=4, busy_ticks=20)


class Engine:
    name = "m"
    pid = 1

    def __init__(self, seconds_per_tick: float | None = 0.0) -> None:
        self.pings = 0
        self.reason: str | None = None
        self._per_tick = seconds_per_tick
        self._seconds = 5.0

    def ping(self) -> None:
        self.pings += 1

    def processor_seconds(self) -> float | None:
        if self._per_tick is None:
            return None
        self._seconds += self._per_tick
        return self._seconds

    def kill_stuck(self, reason: str) -> None:
        self.reason = reason


@pytest.fixture
async def watch():
    dogs = []

    def start(engine: Engine) -> Watchdog:
        dog = Watchdog(engine, LIMITS)
        dogs.append(dog)
        dog.watch()
        dog._tick()  # the first one only starts the count
        return dog

    yield start
    for dog in dogs:
        dog.rest()


def ticks_until_given_up(dog: Watchdog, engine: Engine) -> int:
    for tick in range(1, 100):
        dog._tick()
        if engine.reason is not None:
            return tick
    raise AssertionError("never given up")


async def test_a_stopped_engine_is_given_up_soon_and_reported_before(watch):
    engine = Engine(0.0)
    dog = watch(engine)
    dog._tick()
    assert (dog.silence, engine.pings) == (0.0, 1)
    dog._tick()
    assert dog.silence == 5.0
    assert ticks_until_given_up(dog, engine) == 2
    assert engine.pings == 1
    assert engine.reason == "no answer for 10 s: it does not answer and uses no processor time"


@pytest.mark.parametrize("seconds", [0.1, None])
async def test_a_starved_or_disk_bound_engine_is_given_time(watch, seconds):
    engine = Engine(seconds)
    dog = watch(engine)
    assert ticks_until_given_up(dog, engine) == LIMITS.busy_ticks


@pytest.fixture
def work_of_load(monkeypatch):
    """Work of the load at each tick."""
    work = []
    monkeypatch.setattr(restart_policy, "load_work", lambda _: work.pop(0) if len(work) > 1 else work[0])
    return work


def start_load(limits=LIMITS):
    engine = Engine()
    dog = Watchdog(engine, limits)
    dog.watch(is_loading=True)
    dog._tick()
    return dog, engine


async def test_a_load_without_work_is_reported_and_given_up(work_of_load, caplog):
    work_of_load[:] = [5.0]
    dog, engine = start_load()
    dog._tick()
    assert dog.silence == 0.0
    dog._tick()
    assert dog.silence == 5.0
    assert "engine m is loading without progress: 5 s so far" in caplog.text
    assert ticks_until_given_up(dog, engine) == LIMITS.stuck_load_ticks - 2
    assert engine.reason == "no progress for 60 s: it loads, and neither computes nor reads"
    assert engine.pings == 0
    assert dog._timer is None


@pytest.mark.parametrize("work", [[float(n) for n in range(200)], [None]])
async def test_a_load_that_works_is_given_more_time(work_of_load, work):
    work_of_load[:] = work
    dog, engine = start_load(WatchLimits(stuck_load_ticks=4, busy_load_ticks=40))
    assert ticks_until_given_up(dog, engine) == 40
    assert dog.silence == 0.0
    assert "in one stage for too long" in engine.reason


async def test_a_thread_that_polls_is_no_work(work_of_load):
    work_of_load[:] = [0.01 * n for n in range(200)]
    dog, engine = start_load()
    assert ticks_until_given_up(dog, engine) == LIMITS.stuck_load_ticks
    dog.watch()  # the next one is ready
    dog._tick()
    assert not dog._is_loading
    dog.rest_between_requests()
    assert dog._timer is None


async def test_a_load_is_watched_without_requests(work_of_load):
    work_of_load[:] = [1.0]
    dog, _ = start_load()
    dog.rest_between_requests()
    assert dog._timer is not None
    dog.rest()


async def test_any_word_starts_the_count_again(watch):
    engine = Engine(0.0)
    dog = watch(engine)
    for _ in range(10):
        for _ in range(LIMITS.stuck_ticks - 1):
            dog._tick()
        dog.got_message = True
        assert dog.silence == 0.0
        dog._tick()
    assert engine.reason is None


async def test_at_rest_nothing_ticks(watch):
    dog = watch(Engine())
    dog.rest()
    assert dog._timer is None


@pytest.mark.parametrize(
    ("code", "is_known"),
    [
        ("import signal; signal.pause()", True),
        ("while True: pass", False),
        ("import threading\ndef spin():\n  while True: pass\nthreading.Thread(target=spin).start()", False),
    ],
)  # fmt: skip
def test_who_waits_for_a_core_is_not_taken_for_one_that_uses_none(code, is_known):
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        until(lambda: (processor_seconds(child.pid) is not None) is is_known)
        child.send_signal(signal.SIGSTOP)
        until(lambda: processor_seconds(child.pid) is not None)  # whatever it did: stopped, it uses none
    finally:
        child.kill()
        child.communicate()
    assert processor_seconds(child.pid) is None


def test_work_of_a_load_is_that_of_its_children_and_of_disks(monkeypatch):
    """A child that spins is work; one that sleeps is not; who waits for another's lock is given time."""
    spinning = (
        "import subprocess, sys, time; subprocess.run([sys.executable, '-S', '-c', 'while True: pass'])"
    )
    for code, has_worked in ((spinning, True), ("import time; print(flush=True); time.sleep(999)", False)):
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            if has_worked:
                until(lambda pid=child.pid: len(family_of(pid)) == 2 and load_work(pid) is None)  # it runs
            else:
                child.stdout.readline()
                until(lambda pid=child.pid: load_work(pid) is not None)
                before = load_work(child.pid)
                assert load_work(child.pid) == before
                monkeypatch.setattr(restart_policy, "bytes_from_disk", lambda _: 50_000_000)
                assert load_work(child.pid) >= before - 1.0 + 5.0
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


def test_who_waits_for_a_lock_of_another_process_is_known(tmp_path):
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    file = tmp_path / "lock"
    file.touch()

    def lock():
        return subprocess.Popen(
            [sys.executable, "-S", "-c", code, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    with lock() as holder:
        holder.stdout.readline()
        with lock() as waiting:
            until(lambda: waits_for_file_lock([waiting.pid]))
            assert load_work(waiting.pid) is None
            assert not waits_for_file_lock([holder.pid])
            holder.communicate()
            waiting.stdout.readline()
            assert not waits_for_file_lock([waiting.pid])
            waiting.communicate()
