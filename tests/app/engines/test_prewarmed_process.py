"""A spare engine process: taken by the next load or restart, and never left behind."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from llmbox.app.engines import engine_process as module
from llmbox.app.engines.engine_process import PrewarmedProcess
from llmbox.app.engines.supervisor import Supervisor, SupervisorOptions
from llmbox.engine.ipc.spawn import Launch, SpawnedProcess, spawn
from support.engines import assert_undisturbed, config, go_on, is_running, kill, request, until
from support.fake_engine import fake_launch


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.01)


def spare_of(spares: PrewarmedProcess) -> SpawnedProcess | None:
    return spares._spare


async def ready(spares: PrewarmedProcess) -> int:
    """The pid of the spare, once there is one."""
    await until(lambda: spare_of(spares) is not None)
    spare = spare_of(spares)
    assert spare is not None
    return spare.process.pid


async def test_a_restart_takes_the_spare_and_another_follows(tmp_path: Path) -> None:
    spares = PrewarmedProcess(fake_launch(), keep=True)
    subject = Supervisor(config(tmp_path, step_delay=0.002, hold_at=400), SupervisorOptions(spares=spares))
    try:
        await subject.start()
        waiting = await ready(spares)
        stream = subject.submit(request(1, 500))
        await until(lambda: len(stream.output_ids) > 3)
        kill(subject)
        go_on(tmp_path)
        await assert_undisturbed([stream])
        assert stream.resumes == 1
        assert subject.pid == waiting
        assert subject.restarts == 1
        assert await ready(spares) != waiting
    finally:
        await subject.stop()
        spares.close()


async def test_the_first_process_may_have_been_started_before(tmp_path: Path) -> None:
    first = spawn(fake_launch())
    spares = PrewarmedProcess(fake_launch(), keep=False, first=first)
    subject = Supervisor(config(tmp_path), SupervisorOptions(spares=spares))
    await subject.start()
    assert subject.pid == first.process.pid
    await subject.stop()
    assert spare_of(spares) is None


async def test_a_spare_that_died_is_replaced(tmp_path: Path) -> None:
    first = spawn(fake_launch())
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    subject = Supervisor(
        config(tmp_path), SupervisorOptions(spares=PrewarmedProcess(fake_launch(), keep=False, first=first))
    )
    await subject.start()
    assert subject.pid not in {None, first.process.pid}
    assert subject.restarts == 0
    await subject.stop()


async def test_a_spare_that_dies_as_it_is_taken_is_a_death_like_any_other(tmp_path: Path) -> None:
    spares = PrewarmedProcess(fake_launch(), keep=True)
    subject = Supervisor(config(tmp_path), SupervisorOptions(spares=spares))
    await subject.start()
    os.kill(await ready(spares), signal.SIGSTOP)
    doomed = await ready(spares)
    kill(subject)
    await until(lambda: subject.pid == doomed)
    os.kill(doomed, signal.SIGKILL)
    await until(lambda: subject.state == "ready" and subject.restarts == 2)
    await subject.stop()
    spares.close()


async def test_none_is_started_while_requests_run() -> None:
    busy = True
    spares = PrewarmedProcess(fake_launch(), keep=True, busy=lambda: busy)
    spares.take().discard()
    await asyncio.sleep(0.05)
    assert spare_of(spares) is None
    busy = False
    await ready(spares)
    spares.close()


async def test_none_is_kept_where_nobody_wants_one() -> None:
    spares = PrewarmedProcess(fake_launch(), keep=False)
    spares.take().discard()
    await asyncio.sleep(0.05)
    assert spare_of(spares) is None


async def test_closing_ends_it() -> None:
    spares = PrewarmedProcess(fake_launch(), keep=True)
    spares.take().discard()
    pid = await ready(spares)
    spares.close()
    assert not is_running(pid)
    await asyncio.sleep(0.05)
    assert spare_of(spares) is None


async def test_what_cannot_be_spawned_is_an_error_of_the_load_alone(tmp_path: Path) -> None:
    spares = PrewarmedProcess(Launch(command=("/nowhere/python",)), keep=True)
    with pytest.raises(OSError, match="nowhere"):
        spares.take()
    await asyncio.sleep(0.05)
    spares.close()
