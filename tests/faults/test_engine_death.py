"""The engine process dies or stops under open streams: every stream gets the tokens it would have had."""

import asyncio
import random
import signal
import time

import pytest

from llmbox.app.engines import engine_process
from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.restart_policy import RestartLimits, WatchLimits
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from support.engines import (
    assert_undisturbed,
    config,
    is_running,
    kill,
    read,
    read_all,
    request,
    supervised,
    undisturbed,
    until,
)
from support.fake_engine import fake_launch

PATIENT = RestartLimits(deaths=1000, pauses=(0.0,))


def slow_clock() -> float:
    """Five deaths come within a minute of it also where each restart takes half a minute."""
    return time.monotonic() / 100


async def test_32_streams_survive_kills_at_random_moments(tmp_path):
    rng = random.Random(7)
    async with supervised(
        tmp_path, supervisor={"deaths": PATIENT}, step_delay=0.002, max_running=24, prefill_per_step=3
    ) as supervisor:
        for round_ in range(6):
            streams = [supervisor.submit(request(round_ * 100 + i, 80)) for i in range(32)]
            reading = asyncio.create_task(assert_undisturbed(streams))
            await asyncio.sleep(rng.uniform(0.0, 0.25))
            kill(supervisor)
            await reading
            await until(
                lambda round_=round_: supervisor.restarts == round_ + 1 and supervisor.state == "ready"
            )
        assert supervisor.restarts == 6
        assert supervisor.resumed > 0
        control = supervisor.submit(request(5000))
        await assert_undisturbed([control])
        assert control.resumes == 0


async def test_kills_during_recovery_accuse_nobody(tmp_path):
    limits = RestartLimits(pauses=(0.0,))
    async with supervised(tmp_path, supervisor={"deaths": limits}, step_delay=0.01) as supervisor:
        streams = [supervisor.submit(request(i, 4000)) for i in range(8)]
        reading = asyncio.create_task(read_all(streams))
        for _ in range(4):
            outputs = sum(len(stream.output_ids) for stream in streams)
            await until(lambda: supervisor.state == "ready" and supervisor.pid)
            await until(lambda seen=outputs: sum(len(stream.output_ids) for stream in streams) > seen)
            restarts = supervisor.restarts
            kill(supervisor)
            await until(lambda seen=restarts: supervisor.restarts > seen)
        await until(lambda: supervisor.state == "ready")
        outputs = sum(len(stream.output_ids) for stream in streams)
        await until(lambda: sum(len(stream.output_ids) for stream in streams) > outputs)
        assert max(stream.resumes for stream in streams) == 4
        for stream in streams:
            stream.cancel()
        for stream, (tokens, last) in zip(streams, await reading, strict=True):
            assert last.finish_reason == "abort"
            assert tokens == undisturbed(stream)[: len(tokens)]


async def test_killed_while_it_loads_again(tmp_path):
    async with supervised(tmp_path, load_delay=0.8, step_delay=0.005) as supervisor:
        streams = [supervisor.submit(request(i, 300)) for i in range(4)]
        reading = asyncio.create_task(assert_undisturbed(streams))
        await until(lambda: streams[0].output_ids)
        first = supervisor.pid
        kill(supervisor)
        await until(lambda: supervisor.pid not in {None, first})
        kill(supervisor)
        late = supervisor.submit(request(99))
        await reading
        await assert_undisturbed([late])
        assert late.resumes == 0


async def test_five_deaths_fail_the_model_with_a_reason(tmp_path):
    async with supervised(tmp_path, supervisor={"clock": slow_clock}, step_delay=0.01) as supervisor:
        streams = [supervisor.submit(request(i, 4000)) for i in range(3)]
        ends = asyncio.create_task(read_all(streams))
        for _ in range(5):
            await until(lambda: supervisor.state != "restarting")
            restarts = supervisor.restarts
            kill(supervisor)
            await until(lambda seen=restarts: supervisor.restarts > seen)
        for stream, (tokens, last) in zip(streams, await ends, strict=True):
            assert (last.finish_reason, last.error_code) == ("error", "engine_failed")
            assert tokens == undisturbed(stream)[: len(tokens)]
        assert supervisor.state == "failed"
        ready, cause = supervisor.readiness()
        assert not ready
        assert "5 times in 60 s" in cause
        assert "SIGKILL" in cause
        with pytest.raises(ApiError) as refused:
            supervisor.submit(request(9))
        assert (refused.value.status, refused.value.code) == (503, "engine_failed")


async def test_deaths_far_apart_do_not_add_up(tmp_path):
    now = 0.0
    limits = RestartLimits(pauses=(0.0,))
    async with supervised(tmp_path, supervisor={"clock": lambda: now, "deaths": limits}) as supervisor:
        for _ in range(7):
            await until(lambda: supervisor.state == "ready")
            restarts = supervisor.restarts
            kill(supervisor)
            await until(lambda seen=restarts: supervisor.restarts > seen)
            now += 20.0
        await until(lambda: supervisor.state == "ready")


async def test_after_the_kernel_killed_it_for_memory_it_takes_less(tmp_path, monkeypatch):
    """Half of the KV pool each time, down to what one request may need."""
    kills = 0
    monkeypatch.setattr(engine_process, "oom_kills", lambda: kills)
    sizes = {"num_blocks": 1000, "context": 1600}
    async with supervised(tmp_path, supervisor={"deaths": PATIENT}, step_delay=0.005, **sizes) as supervisor:
        found = [supervisor.info.num_blocks]
        for round_ in range(5):
            streams = [supervisor.submit(request(round_ * 100 + i, 80)) for i in range(4)]
            reading = asyncio.create_task(assert_undisturbed(streams))
            await until(lambda seen=streams[0]: seen.output_ids)
            kills += 1
            kill(supervisor)
            await reading
            found.append(supervisor.info.num_blocks)
        assert found == [1000, 500, 250, 125, 100, 100]
        kill(supervisor)  # not for memory: nothing changes
        await until(lambda: supervisor.restarts == 6 and supervisor.state == "ready")
        assert supervisor.info.num_blocks == 100


async def test_a_stopped_engine_is_noticed_killed_and_resumed(tmp_path):
    watch = WatchLimits(tick=0.25)
    async with supervised(tmp_path, supervisor={"watch": watch}, step_delay=0.01) as supervisor:
        streams = [supervisor.submit(request(i, 60)) for i in range(4)]
        reading = asyncio.create_task(assert_undisturbed(streams))
        await until(lambda: streams[0].output_ids)
        stopped = supervisor.pid
        late = supervisor.submit(request(99))  # the others may have ended while we had no processor
        kill(supervisor, signal.SIGSTOP)
        await until(lambda: not supervisor.readiness()[0])
        assert "not answered" in supervisor.readiness()[1]
        await reading
        await assert_undisturbed([late])
        assert supervisor.restarts == 1
        assert not is_running(stopped)
        await until(lambda: supervisor.readiness()[0])


async def test_a_load_that_stands_still_is_reported_killed_and_tried_once_more(tmp_path):
    watch = WatchLimits(tick=0.25, stuck_load_ticks=12)
    subject = Supervisor(config(tmp_path), SupervisorOptions(launch=fake_launch(), watch=watch))
    starting = asyncio.create_task(subject.start())
    try:
        await subject.launched()
        stopped = subject.pid
        kill(subject, signal.SIGSTOP)
        await until(lambda: "stood still" in subject.load_stage)
        assert "stood still" in subject.readiness()[1]
        await starting
        assert subject.readiness() == (True, "")
        assert not is_running(stopped)
        await assert_undisturbed([subject.submit(request(1))])
    finally:
        await subject.stop()


async def test_a_load_that_stands_still_twice_fails_with_the_reason(tmp_path, caplog):
    watch = WatchLimits(tick=0.1, stuck_load_ticks=10)
    subject = Supervisor(
        config(tmp_path, load_delay=1e6), SupervisorOptions(launch=fake_launch(), watch=watch)
    )
    with pytest.raises(ApiError, match=r"no progress for 1 s: it loads, and neither computes nor reads"):
        await subject.start()
    assert (subject.state, subject.pid) == ("failed", None)
    assert sum("no progress for 1 s" in record.message for record in caplog.records) == 2
    assert any("is loading without progress" in record.message for record in caplog.records)


async def test_a_load_that_computes_is_given_time(tmp_path):
    """It says nothing for a second, three times over; an idle one would be given up after half of one."""
    watch = WatchLimits(tick=0.1, stuck_load_ticks=5)
    async with supervised(tmp_path, supervisor={"watch": watch}, load_spin=3.0) as supervisor:
        await assert_undisturbed([supervisor.submit(request(1))])
        assert supervisor.restarts == 0


async def test_a_stop_shorter_than_the_limit_is_only_reported(tmp_path):
    watch = WatchLimits(tick=0.1, stuck_ticks=10_000)
    async with supervised(tmp_path, supervisor={"watch": watch}, step_delay=0.01) as supervisor:
        stream = supervisor.submit(request(1, 200))
        await until(lambda: stream.output_ids)
        late = supervisor.submit(request(2))  # the first may have ended while we had no processor
        kill(supervisor, signal.SIGSTOP)
        await until(lambda: not supervisor.readiness()[0])
        kill(supervisor, signal.SIGCONT)
        await assert_undisturbed([stream, late])
        assert supervisor.restarts == 0
        assert supervisor.readiness() == (True, "")


async def test_a_step_that_computes_for_long_is_given_time(tmp_path):
    """It spins: an idle engine would be given up after 1 s, this one only after 3 s."""
    watch = WatchLimits(tick=0.25, busy_ticks=12)
    async with supervised(tmp_path, supervisor={"watch": watch}, poison=66, poison_kind="spin") as supervisor:
        stream = supervisor.submit(request(1, prompt_ids=[66]))
        await asyncio.sleep(1.8)  # the same loop counts the ticks: the twelfth cannot come before this ends
        assert supervisor.restarts == 0
        await until(lambda: supervisor.restarts)
        stream.cancel()


async def test_an_idle_engine_that_dies_is_restarted(tmp_path):
    async with supervised(tmp_path) as supervisor:
        kill(supervisor)
        await until(lambda: supervisor.restarts == 1 and supervisor.state == "ready")
        await assert_undisturbed([supervisor.submit(request(1))])


async def test_stop_while_restarting_leaves_no_process(tmp_path):
    async with supervised(tmp_path, load_delay=0.8) as supervisor:
        stream = supervisor.submit(request(1, 4000))
        first = supervisor.pid
        kill(supervisor)
        await until(lambda: supervisor.pid not in {None, first})
        pid = supervisor.pid
        await supervisor.stop()
        assert not is_running(pid)
        _, last = await read(stream)
        assert last.error_code == "model_unloaded"
