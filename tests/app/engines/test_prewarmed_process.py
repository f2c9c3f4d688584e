"""Engine processes made ahead: forked from a server, or a spare that the next load takes."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import psutil
import pytest

from llmbox.app.engines import engine_process as module
from llmbox.app.engines.engine_process import PrewarmedProcess, SupervisorOptions
from llmbox.app.engines.manager import EngineManager
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware import proc
from llmbox.engine.ipc import spawn as spawning
from llmbox.engine.ipc.channel import DaemonGone
from llmbox.engine.ipc.spawn import ForkedProcess, ForkServer, Launch, SpawnedProcess, spawn
from llmbox.engine.process import engine_main
from llmbox.engine.process.engine_main import serve_forks
from support.engines import assert_undisturbed, config, go_on, is_running, kill, request, until
from support.fake_engine import fake_launch


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.01)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where processes are not forked."""
    monkeypatch.setattr(module, "can_fork", lambda: False)


def spare_of(spares: PrewarmedProcess) -> SpawnedProcess | ForkServer | None:
    return spares._spare


async def ready(spares: PrewarmedProcess) -> int:
    """The pid of the spare, once there is one."""
    await until(lambda: spare_of(spares) is not None)
    spare = spare_of(spares)
    assert spare is not None
    return spare.pid if isinstance(spare, ForkServer) else spare.process.pid


class Forked:
    """A supervised engine of a fork server. `options`: of the fake engine."""

    def __init__(self, folder: Path, launch: Launch | None = None, **options: Any) -> None:
        self.spares = PrewarmedProcess(launch or fake_launch(), keep=True)
        self.supervisor = Supervisor(config(folder, **options), SupervisorOptions(spares=self.spares))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()
        self.spares.close()

    @property
    def server(self) -> int:
        spare = spare_of(self.spares)
        assert isinstance(spare, ForkServer)
        return spare.pid

    def is_forked(self) -> bool:
        process = self.supervisor._process
        assert process is not None
        return isinstance(process._client._process, ForkedProcess)


HELD: dict[str, Any] = {"step_delay": 0.002, "hold_at": 400}
"""A stream of 500 tokens is under way until `go_on`."""


async def test_engines_are_forked_from_one_server(tmp_path: Path) -> None:
    async with Forked(tmp_path, **HELD) as box:
        subject = box.supervisor
        await subject.start()
        server, first = box.server, subject.pid
        assert first is not None
        assert box.is_forked()
        engine = psutil.Process(first)
        assert engine.ppid() == os.getpid()  # so that its end is ours to notice, and ours is its end
        assert os.getsid(first) == os.getpgid(first) == first
        assert " ".join(engine.cmdline()).strip() == "llmbox: engine fake"
        stream = subject.submit(request(1, 500))
        await until(lambda: len(stream.output_ids) > 3)
        kill(subject)
        go_on(tmp_path)
        await assert_undisturbed([stream])
        assert (stream.resumes, subject.restarts) == (1, 1)
        assert box.is_forked()
        assert box.server == server
        assert not is_running(first)


async def test_what_a_forked_engine_says_and_how_it_ends_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with Forked(tmp_path, die_after_steps=3) as box:
        subject = box.supervisor
        await subject.start()
        assert box.is_forked()
        await until(lambda: "fake | ready after" in caplog.text)  # lines come by another pipe than messages
        subject.submit(request(1, 500))
        await until(lambda: subject.restarts > 0)
        assert "exited with code" in caplog.text
    async with Forked(tmp_path / "other", load_crash=True) as box:
        with pytest.raises(ApiError, match="ended while loading: exited with code 70"):
            await box.supervisor.start()


async def test_engines_outlive_their_server_and_another_follows(tmp_path: Path) -> None:
    async with Forked(tmp_path, **HELD) as box:
        subject = box.supervisor
        await subject.start()
        server, engine = box.server, subject.pid
        stream = subject.submit(request(1, 500))
        await until(lambda: len(stream.output_ids) > 3)
        os.kill(server, signal.SIGKILL)
        go_on(tmp_path)
        await assert_undisturbed([stream])
        assert (subject.pid, subject.restarts) == (engine, 0)
        await until(lambda: not is_running(server))
        assert await ready(box.spares) != server
        kill(subject)
        await until(lambda: subject.state == "ready" and subject.restarts == 1)
        assert box.is_forked()


async def test_without_its_server_an_engine_is_started_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_QUIET_SECONDS", 600.0)
    async with Forked(tmp_path, **HELD) as box:
        subject = box.supervisor
        await subject.start()
        stream = subject.submit(request(1, 500))
        await until(lambda: len(stream.output_ids) > 3)
        os.kill(box.server, signal.SIGKILL)
        kill(subject)
        go_on(tmp_path)
        await assert_undisturbed([stream])
        assert (stream.resumes, subject.restarts) == (1, 1)


async def test_a_server_that_does_not_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Forked(tmp_path) as box:
        await box.supervisor.start()
        monkeypatch.setattr(spawning, "_ANSWER_S", 0.05)
        monkeypatch.setattr(module, "_QUIET_SECONDS", 600.0)
        server = box.server
        os.kill(server, signal.SIGSTOP)
        kill(box.supervisor)
        await until(lambda: box.supervisor.state == "ready" and box.supervisor.restarts == 1)
        assert not box.is_forked()
        assert not is_running(server)
        assert spare_of(box.spares) is None


async def test_a_machine_that_does_not_fork_is_not_asked_twice(tmp_path: Path) -> None:
    refuses = (
        f"import sys; '--forks' in sys.argv and sys.exit(9); exec(open({fake_launch().command[-1]!r}).read())"
    )
    command = (sys.executable, "-P", "-c", f"import sys; sys.path[0:0] = {sys.path!r}; {refuses}")
    async with Forked(tmp_path, Launch(command=command)) as box:
        await box.supervisor.start()
        assert not box.is_forked()
        await ready(box.spares)
        assert isinstance(spare_of(box.spares), SpawnedProcess)


async def test_a_fork_that_fails_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer(fake_launch())
    try:
        channel = server._server.channel
        monkeypatch.setattr(
            type(channel), "recv", lambda *_: (-errno.EAGAIN).to_bytes(4, "little", signed=True)
        )
        with pytest.raises(BlockingIOError):
            server.fork()
    finally:
        server.close()


async def test_an_engine_that_nobody_waits_for_any_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SpawnedProcess] = []
    fork = ForkServer.fork

    def remembered(server: ForkServer) -> SpawnedProcess:
        made.append(fork(server))
        return made[-1]

    monkeypatch.setattr(ForkServer, "fork", remembered)
    async with Forked(tmp_path) as box:
        starting = asyncio.create_task(box.supervisor.start())
        await until(lambda: spare_of(box.spares) is not None)
        await box.supervisor.stop()
        assert isinstance(await asyncio.gather(starting, return_exceptions=True), list)
        await until(lambda: made and made[0].process.returncode is not None)
        assert made[0].process.returncode == -signal.SIGKILL


async def test_a_process_is_forked_while_room_is_made_and_ended_where_there_is_none(tmp_path: Path) -> None:
    server = ForkServer(fake_launch())
    text: Any = SimpleNamespace(warnings=(), encoder=None, close=lambda: None)
    text.beside_embedding = lambda _rows: text
    manager = EngineManager(lambda _: text, keep_spare=True, first=server)
    seen: list[int] = []

    async def refuse(_config: EngineConfig, _on_request: bool) -> EngineConfig:
        ahead = manager._spares._ahead
        assert ahead is not None
        seen.append((await asyncio.shield(ahead)).process.pid)
        raise ApiError(503, "no room", "does_not_fit")

    async def admit(config: EngineConfig, _on_request: bool) -> EngineConfig:
        ahead = manager._spares._ahead
        assert ahead is not None
        seen.append((await asyncio.shield(ahead)).process.pid)
        return config

    try:
        manager.admit = refuse
        with pytest.raises(ApiError, match="no room"):
            await manager.load(config(tmp_path))
        await until(lambda: not is_running(seen[0]))
        manager.admit = admit
        loaded = await manager.load(config(tmp_path))
        assert loaded.supervisor.pid == seen[1]
    finally:
        await manager.close()


async def test_a_process_forked_ahead_that_has_ended_is_not_used(tmp_path: Path) -> None:
    async with Forked(tmp_path) as box:
        await box.supervisor.start()
        box.spares.begin()
        ahead = box.spares._ahead
        assert ahead is not None
        ended = await ahead
        ended.process.kill()
        await until(lambda: not ended.alive)
        taken = await box.spares.take()
        assert taken.process.pid != ended.process.pid
        assert taken.alive
        taken.discard()


def test_what_engines_have_in_common_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first fork, and behind each until it can be: the first engine compiles the kernels."""
    ours, theirs = socket.socketpair()
    done: list[str] = []

    def prepare() -> bool:
        done.append("prepares")
        return done.count("prepares") == 3

    def fork() -> int:
        done.append("forks")
        return 7

    for name, to in (("num_threads", lambda: 1), ("setproctitle", str), ("fork_sibling", fork)):
        monkeypatch.setattr(engine_main, name, to)
    monkeypatch.setattr(engine_main.gc, "freeze", lambda: None)
    with ours, theirs, open(os.devnull, "wb") as log:  # noqa: PTH123 - a descriptor
        for _ in range(4):
            socket.send_fds(ours, [b"\0"], (log.fileno(), log.fileno()))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(DaemonGone):
            serve_forks(theirs, prepare)
    assert done == ["prepares", "forks", "prepares", "forks", "prepares", "forks", "forks"]


def test_forked_engines_end_with_the_process_that_asked_for_them() -> None:
    script = (
        "import time; from llmbox.engine.ipc.spawn import ForkServer\n"
        "from support.fake_engine import fake_launch\n"
        "server = ForkServer(fake_launch()); forked = server.fork()\n"
        "print(server.pid, forked.process.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-P", "-c", f"import sys; sys.path[0:0] = {sys.path!r}; {script}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        process.kill()
    processes = [psutil.Process(pid) for pid in pids if is_running(pid)]
    assert not psutil.wait_procs(processes, timeout=60)[1]


def test_a_process_with_threads_does_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("llmbox.engine.process.engine_main.num_threads", lambda: 2)
    with ours, theirs, pytest.raises(RuntimeError, match="2 threads cannot be forked"):
        serve_forks(theirs, lambda: True)


def test_nothing_is_forked_beside_a_gpu_or_pinned_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "NVIDIA_FILES", (tmp_path / "nvidiactl",))
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    assert proc.can_fork()
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert not proc.can_fork()
    monkeypatch.delenv("OMP_PROC_BIND")
    (tmp_path / "nvidiactl").touch()
    assert not proc.can_fork()


@pytest.mark.usefixtures("gpu")
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


@pytest.mark.usefixtures("gpu")
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


@pytest.mark.usefixtures("gpu")
async def test_none_is_started_while_requests_run() -> None:
    busy = True
    spares = PrewarmedProcess(fake_launch(), keep=True, busy=lambda: busy)
    (await spares.take()).discard()
    await asyncio.sleep(0.05)
    assert spare_of(spares) is None
    busy = False
    await ready(spares)
    spares.close()


async def test_none_is_kept_where_nobody_wants_one() -> None:
    spares = PrewarmedProcess(fake_launch(), keep=False)
    (await spares.take()).discard()
    await asyncio.sleep(0.05)
    assert spare_of(spares) is None


@pytest.mark.parametrize("forks", [True, False])
async def test_closing_ends_it(monkeypatch: pytest.MonkeyPatch, *, forks: bool) -> None:
    monkeypatch.setattr(module, "can_fork", lambda: forks)
    spares = PrewarmedProcess(fake_launch(), keep=True)
    (await spares.take()).discard()
    pid = await ready(spares)
    spares.close()
    assert not is_running(pid)
    await asyncio.sleep(0.05)
    assert spare_of(spares) is None


async def test_what_cannot_be_spawned_is_an_error_of_the_load_alone(tmp_path: Path) -> None:
    spares = PrewarmedProcess(Launch(command=("/nowhere/python",)), keep=True)
    with pytest.raises(OSError, match="nowhere"):
        await spares.take()
    await asyncio.sleep(0.05)
    spares.close()
