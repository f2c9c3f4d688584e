"""Broken messages between engine and daemon, and a daemon that dies or does not read."""

import asyncio
import gc
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.restart_policy import WatchLimits
from llmbox.app.engines.supervisor import Supervisor
from llmbox.engine.ipc.spawn import Launch
from support import garbling_engine, little_daemon
from support.engines import assert_undisturbed, config, is_running, request, supervised, until


@pytest.mark.parametrize("how", ["cut", "oversized", "flipped"])
async def test_a_broken_message_restarts_the_engine_and_loses_no_token(tmp_path, how):
    launch = Launch(
        command=(sys.executable, "-P", garbling_engine.__file__),
        env={"GARBLE": how, "GARBLE_ONCE": str(tmp_path / "done")},
    )
    supervisor = Supervisor(config(tmp_path, step_delay=0.002), SupervisorOptions(launch=launch))
    causes = []
    try:
        await supervisor.start()
        supervisor._options = SupervisorOptions(launch=launch, on_change=lambda s: causes.append(s.cause))
        await assert_undisturbed([supervisor.submit(request(i)) for i in range(8)])
        assert supervisor.restarts == 1
        assert any("broken message" in cause for cause in causes)
    finally:
        await supervisor.stop()


@pytest.mark.parametrize("engine_signal", [None, signal.SIGSTOP])
async def test_the_engine_dies_with_its_daemon(tmp_path, engine_signal):
    daemon = await asyncio.create_subprocess_exec(
        sys.executable, "-P", little_daemon.__file__, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    engine = int(await daemon.stdout.readline())
    assert psutil.Process(engine).cmdline()[0].startswith("llmbox: engine fake")
    if engine_signal is not None:
        os.kill(engine, engine_signal)
    daemon.kill()
    await daemon.wait()
    await until(lambda: not is_running(engine))


async def test_ctrl_c_on_the_group_leaves_the_engine_alone(tmp_path):
    async with supervised(tmp_path, step_delay=0.005) as supervisor:
        stream = supervisor.submit(request(1))
        assert os.getpgid(supervisor.pid) == supervisor.pid != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(supervisor.pid, number)
        await assert_undisturbed([stream])
        assert supervisor.restarts == 0


async def test_a_daemon_that_stands_still_does_not_blame_the_engine(tmp_path):
    """The loop is blocked for far longer than the watchdog's limit."""
    watch = WatchLimits(tick=0.2)
    async with supervised(tmp_path, supervisor={"watch": watch}, step_delay=0.01) as supervisor:
        stream = supervisor.submit(request(1, 200))
        await until(lambda: stream.output_ids)
        time.sleep(1.5)  # noqa: ASYNC251 - standing still is the point
        await assert_undisturbed([stream])
        assert supervisor.restarts == 0


async def test_no_descriptor_is_left_behind(tmp_path):
    def descriptors() -> int:
        gc.collect()  # what other tests have left open
        return len(list(Path("/proc/self/fd").iterdir()))

    async with supervised(tmp_path) as supervisor:
        await supervisor.submit(request(1)).__anext__()
    before = descriptors()
    for _ in range(3):
        async with supervised(tmp_path) as supervisor:
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda supervisor=supervisor: supervisor.restarts == 1)
    assert descriptors() == before


async def test_idle_costs_nothing(tmp_path):
    """Neither side polls: no processor time and no wake-ups worth mentioning in a second without requests."""
    async with supervised(tmp_path) as supervisor:
        await assert_undisturbed([supervisor.submit(request(1))])
        engine, daemon = psutil.Process(supervisor.pid), psutil.Process()

        async def rests() -> bool:
            switches = engine.num_ctx_switches().voluntary
            before = sum(engine.cpu_times()[:2]) + sum(daemon.cpu_times()[:2])
            await asyncio.sleep(1.0)
            used = sum(engine.cpu_times()[:2]) + sum(daemon.cpu_times()[:2]) - before
            return used < 0.05 and engine.num_ctx_switches().voluntary - switches < 5

        async with asyncio.timeout(90):  # what came with the request may take its time to end
            while not await rests():
                pass
