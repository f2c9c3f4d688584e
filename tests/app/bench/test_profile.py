"""Tables of where a step's time goes."""

import threading

import pytest

from llmbox.app.bench.profile import BARRIERS, LevelProfile, ProfileSession, profiled
from llmbox.app.errors import CliError
from llmbox.app.telemetry.daemon_profile import DaemonProfiler, DaemonTimes, name_of_stack
from llmbox.engine.ipc.profile_messages import KernelShare, StepProfile

ENGINE = StepProfile(
    is_on=False,
    steps=10,
    tokens=80,
    seconds=1.0,
    spans={"scheduler": 0.05, "output head": 0.2, "waiting for requests": 0.1, "engine loop": 0.001},
    kernels=[
        KernelShare(name="linears", seconds=0.5, waited=0.1, floor=0.6, reading=0.5),
        KernelShare(name="attention", seconds=0.149, waited=0.0, floor=0.0, reading=0.0),
    ],
    threads=2,
    read_rate=30e9,
    product_rate=300e9,
)
DAEMON = DaemonTimes(threads={"event loop": 0.02}, loop={"SSE": 0.015, "other": 0.005})


def test_rows_add_up_to_the_time_of_the_client():
    profile = LevelProfile(ENGINE, DAEMON, 1.0)
    assert sum(profile.rows.values()) == pytest.approx(1.0)
    assert profile.accounted == pytest.approx(1.0)
    assert profile.rows[BARRIERS] == 0.1
    table, _ = profile.lines()
    assert table[0] == ("linears", "40.00", "40.0%")
    assert table[-2:] == [("smaller ones", "0.10", "0.1%"), ("together", "100.00", "100.0%")]


def test_the_bound_and_the_thief_are_named():
    profile = LevelProfile(ENGINE, DAEMON, 1.0)
    assert profile.bound == "memory-bound"
    assert profile.thief == ("attention", 0.149)  # neither the linears, which are at their bound, nor rest
    verdict, beside = profile.lines()[1]
    assert verdict == (
        "memory-bound, 67% of what this machine sustains (reads 30 GB/s, multiplies 300 G/s, 2 threads); "
        "the thief is attention, 14.90 ms a step"
    )
    assert beside.endswith("event loop 2.00 (event loop: SSE 1.50, other 0.50)")
    assert profile.as_dict()["bound_share"] == pytest.approx(0.6 / 0.9)


def test_without_rates_there_is_no_bound():
    profile = LevelProfile(StepProfile(is_on=False, steps=1, seconds=1.0, spans={"engine": 1.0}), DAEMON, 1.0)
    assert profile.as_dict()["bound"] is None
    assert profile.lines()[1][0] == "No bound is known for these kernels."


class Admin:
    def __init__(self):
        self.asked = []

    def post(self, path, body, timeout=None):
        self.asked.append(body["is_on"])
        engine = {"is_on": body["is_on"], "steps": 3}
        return {"engine": engine, "daemon": None if body["is_on"] else {"threads": {}, "loop": {}}}


async def test_a_profile_ends_though_the_load_fails():
    admin = Admin()
    with pytest.raises(RuntimeError):
        async with profiled(admin, "m"):
            raise RuntimeError
    assert admin.asked == [True, False]
    async with profiled(admin, "m") as session:
        pass
    assert session.of_level(2.0).engine.steps == 3


def test_an_engine_without_steps_is_told():
    session = ProfileSession()
    session.engine, session.daemon = StepProfile(is_on=False), DAEMON
    with pytest.raises(CliError, match="there is no profile"):
        session.of_level(1.0)


def test_threads_of_the_daemon_are_timed_and_stacks_are_named():
    profiler = DaemonProfiler()
    assert profiler.stop() == DaemonTimes(threads={}, loop={})
    profiler.start()
    sum(range(300_000))
    times = profiler.stop()
    assert times.threads["event loop"] > 0
    assert set(times.loop) <= {"other", "telemetry"}  # the latter: a sample of start() itself
    assert not [
        thread for thread in threading.enumerate() if thread.name == "profile-sampler" and thread.is_alive()
    ]
    assert name_of_stack(None) == "other"
