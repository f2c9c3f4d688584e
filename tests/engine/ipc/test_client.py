"""The client of one engine process, with the fake engine behind it."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmbox.engine.ipc import messages as m
from llmbox.engine.ipc.client import EngineClient
from llmbox.engine.ipc.spawn import Launch, _environment, spawn
from support.engines import config, is_running, request, until
from support.fake_engine import expected_tokens, fake_launch


class Inbox:
    def __init__(self) -> None:
        self.messages: list[m.ToDaemon] = []
        self.lines: list[str] = []
        self.arrived = asyncio.Event()

    def receive(self, message: m.ToDaemon) -> None:
        self.messages.append(message)
        self.arrived.set()

    async def first(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(60):
            while not (found := [x for x in self.messages if isinstance(x, kind)]):
                self.arrived.clear()
                await self.arrived.wait()
        return found[0]


async def started(tmp_path, launch: Launch | None = None, **options):
    inbox = Inbox()
    client = EngineClient(inbox.receive, inbox.lines.append)
    await client.adopt(spawn(launch or fake_launch()), config(tmp_path, **options))
    return client, inbox


async def test_load_serve_and_end(tmp_path):
    client, inbox = await started(tmp_path)
    ready = await inbox.first(m.Ready)
    assert ready.info.name == "fake"
    assert [p.done for p in inbox.messages if isinstance(p, m.Progress)] == [0, 500, 1000]
    message = request(1, 10)
    client.send(message)
    client.send(m.Ping(nonce=5))
    assert (await inbox.first(m.Pong)).nonce == 5
    ended = await client.stop(60.0)
    assert (ended.code, ended.killed) == (0, False)
    outputs = [o for x in inbox.messages if isinstance(x, m.StepOutputs) for o in x.outputs]
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == expected_tokens(message.prompt_ids, message.params)[: len(tokens)]
    assert any("ready after" in line for line in inbox.lines)


async def test_one_message_a_step(tmp_path):
    client, inbox = await started(tmp_path, step_delay=0.01)
    await inbox.first(m.Ready)
    os.kill(client.pid, signal.SIGSTOP)  # all come before the first step
    for i in range(10):
        client.send(request(i, 5))
    os.kill(client.pid, signal.SIGCONT)
    await until(
        lambda: any(x.stats.output_tokens == 50 for x in inbox.messages if isinstance(x, m.StepOutputs))
    )
    assert len([s for s in inbox.messages if isinstance(s, m.StepOutputs)]) <= 10
    await client.stop(60.0)


async def test_a_failed_load_is_told_and_ends_the_process(tmp_path):
    client, inbox = await started(tmp_path, load_error=("bad_model", "config.json is missing"))
    assert await inbox.first(m.LoadFailed) == m.LoadFailed(code="bad_model", message="config.json is missing")
    assert (await client.wait()).code == 3


async def test_a_crash_leaves_its_traceback_in_the_log(tmp_path):
    client, inbox = await started(tmp_path, load_crash=True)
    ended = await client.wait()
    assert ended.code == 70
    assert "told to crash" in str(ended)
    assert any("Traceback" in line for line in inbox.lines)


async def test_kill(tmp_path):
    client, inbox = await started(tmp_path)
    await inbox.first(m.Ready)
    pid = client.pid
    client.kill()
    ended = await client.wait()
    assert (ended.code, ended.killed) == (-9, True)
    assert not is_running(pid)
    assert not client.alive


@pytest.mark.parametrize("killed", [True, False])
async def test_children_end_with_the_engine(tmp_path, killed):
    """By `kill`, and also when the engine ends by itself and leaves one behind."""
    script = (
        "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True);"
        f"time.sleep({60 if killed else 0})"
    )
    client, inbox = await started(tmp_path, Launch(command=(sys.executable, "-c", script)))
    await until(lambda: inbox.lines)
    child = int(inbox.lines[0])
    if killed:
        client.kill()
    await client.wait()
    await until(lambda: not is_running(child))


async def test_stop_kills_what_does_not_listen(tmp_path):
    client, inbox = await started(tmp_path)
    await inbox.first(m.Ready)
    os.kill(client.pid, signal.SIGSTOP)
    ended = await client.stop(0.2)
    assert ended.killed


async def test_a_stop_that_is_given_up_leaves_no_process(tmp_path):
    client, inbox = await started(tmp_path)
    await inbox.first(m.Ready)
    os.kill(client.pid, signal.SIGSTOP)
    stop = asyncio.ensure_future(client.stop(60.0))
    await asyncio.sleep(0)  # it waits now
    stop.cancel()
    async with asyncio.timeout(30):
        assert (await client.wait()).killed


async def test_the_process_is_set_up_as_promised(tmp_path):
    client, inbox = await started(tmp_path)
    await inbox.first(m.Ready)
    process = psutil.Process(client.pid)
    assert process.cmdline()[0].startswith("llmbox: engine fake")
    proc = Path(f"/proc/{client.pid}")
    assert "Umask:\t0077" in (proc / "status").read_text()
    assert int((proc / "oom_score_adj").read_text()) == 500
    await client.stop(60.0)


async def test_what_cannot_be_spawned_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        await started(tmp_path, Launch(command=("/nowhere/python",)))


async def test_endless_and_hostile_log_lines_are_cut_and_escaped(tmp_path):
    script = "import sys; print('x' * 100_000); print('\\x1b[2Jred', end='')"
    client, inbox = await started(tmp_path, Launch(command=(sys.executable, "-c", script)))
    await client.wait()
    assert max(map(len, inbox.lines)) <= 2 * 8192
    assert inbox.lines[-1] == "\\x1b[2Jred"


def test_secrets_stay_in_the_daemon(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LLMBOX_API_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = _environment({"EXTRA": "1"})
    assert "secret" not in environment.values()
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["EXTRA"] == "1"
