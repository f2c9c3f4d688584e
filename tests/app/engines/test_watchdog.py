"""Ticks by hand: who is given up, after how many, and who is not."""

import signal
import subprocess
import sys

import pytest

from llmbox.app.engines.restart_policy import Watchdog, WatchLimits, processor_seconds
from support.cli_box import until

LIMITS = WatchLimits(tick=2.5, unready_ticks=2, stuck_ticks=4, busy_ticks=20)


class Engine:
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
