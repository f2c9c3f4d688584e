"""The KV cache on disk outlives what is killed: real engines, a real daemon, the same tokens."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.admin_client import Client
from llmbox.app.config.paths import find_paths
from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.restart_policy import RestartLimits
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import CliError
from llmbox.app.lifecycle.instance import read_pid_file
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.kv_store import usage
from llmbox.engine.sampling_params import SamplingParams
from llmbox.kernels.cpu.isa import KERNEL_CACHE
from support.cli_box import PATIENCE, until
from support.engines import ForkedEngines, kill, read_all
from support.engines import until as until_true
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow


def asked(number: int, name: str = "a") -> AddRequest:
    params = SamplingParams(max_tokens=600, min_tokens=600, seed=number, temperature=1.0)
    prompt = [5 + number + i * 7 % 300 for i in range(320)]
    return AddRequest(request_id=f"{name}{number}", prompt_ids=prompt, params=params)


@pytest.mark.parametrize("ranks", [{}, {"tp": 2}, {"pp": 2}], ids=str)
async def test_a_killed_engine_computes_no_prompt_of_its_streams_again(
    tmp_path: Path, ranks: dict[str, Any]
) -> None:
    make_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    options: dict[str, Any] = {"device": "cpu", "memory_bytes": 256 << 20, "threads": 1, **ranks}
    config = EngineConfig(model_path=str(tmp_path / "model"), name="tiny", **options)
    launch = Launch(env=usage.cache_variables(tmp_path / "kv", 1 << 30, 1.0))
    forked = SupervisorOptions(spares=ForkedEngines(launch), deaths=RestartLimits(pauses=(0.0,)))
    supervisor = Supervisor(config, forked)
    apart = Supervisor(config)
    try:
        await apart.start()
        undisturbed = [tokens for tokens, _ in await read_all([apart.submit(asked(i)) for i in range(4)])]
        await supervisor.start()
        streams = [supervisor.submit(asked(i)) for i in range(4)]
        reading = asyncio.create_task(read_all(streams))
        await until_true(lambda: all(len(stream.output_ids) > 3 for stream in streams))
        # Written in the order in which they were computed, so the prompts' blocks are among as many files.
        noted = sum(320 + len(stream.output_ids) for stream in streams) // 16
        await until_true(lambda: len(list((tmp_path / "kv").glob("*/*/*"))) >= noted)
        kill(supervisor)
        assert [tokens for tokens, _ in await reading] == undisturbed
        resumed = sum(stream.resumes for stream in streams)
        assert supervisor.stats.disk_hits == resumed * 320
    finally:
        await supervisor.stop()
        await apart.stop()


class Daemon:
    """`llmbox serve` with the built-in model, in folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.paths = find_paths(folder / "data")
        self.client = Client(self.paths)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        kernels = {KERNEL_CACHE: os.environ[KERNEL_CACHE]} if KERNEL_CACHE in os.environ else {}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmbox", "--data-dir", str(self.paths.data_dir), "serve"],
            env={**kept, **kernels, "LLMBOX_SERVER_PORT": "0", "HF_HOME": str(self.paths.data_dir / "hf")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(self._is_ready)

    def _is_ready(self) -> bool:
        running = read_pid_file(self.paths)
        if running is None or self._process is None or running.pid != self._process.pid:
            return False
        try:
            with urllib.request.urlopen(f"{running.url}/v1/models", timeout=PATIENCE) as answer:
                return bool(json.load(answer)["data"])
        except OSError:
            return False

    def kill(self, how: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE)
            self._process = None

    def ask(self, prompt: str) -> tuple[str, dict[str, Any]]:
        """Return the answer and the row of the request log."""
        running = read_pid_file(self.paths)
        assert running is not None
        body = {"model": "builtin", "prompt": prompt, "max_tokens": 12, "seed": 4, "ignore_eos": True}
        request = urllib.request.Request(
            f"{running.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answers: list[dict[str, Any]] = []

        def has_answer() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    answers.append(json.load(answer))
            except urllib.error.HTTPError as error:
                if error.code != 503:  # the model loads
                    raise
            return bool(answers)

        until(has_answer)
        rows: list[dict[str, Any]] = []

        def has_row() -> bool:
            with contextlib.suppress(CliError):
                found = self.client.get(f"/admin/api/requests/{answers[0]['id']}").get("request")
                rows.extend([found] if found else [])
            return bool(rows)

        until(has_row)
        return answers[0]["choices"][0]["text"], rows[0]

    def written(self) -> int:
        return len(list(self.paths.kv_cache.glob("*/*/*")))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    subject = Daemon(tmp_path)
    try:
        subject.start()
        yield subject
    finally:
        subject.kill(signal.SIGTERM)


def settled(daemon: Daemon) -> int:
    """Return the number of files, once no more are written."""
    before, end = -1, time.monotonic() + PATIENCE
    while (now := daemon.written()) != before or not now:
        assert time.monotonic() < end
        before = now
        time.sleep(0.3)
    return before


def test_prompts_outlive_the_daemon_and_unloads(daemon: Daemon) -> None:
    prompt = "The quick brown fox counts: " + " ".join(str(number) for number in range(180))
    expected, cold = daemon.ask(prompt)
    assert cold["cached_tokens"] == 0
    settled(daemon)
    daemon.kill()
    daemon.start()
    text, warm = daemon.ask(prompt)
    assert (text, warm["prefix_end"]) == (expected, "complete")
    assert warm["disk_tokens"] == warm["cached_tokens"] == warm["looked_up_tokens"] > 100
    settled(daemon)
    daemon.client.post("/admin/api/models/unload", {"model": "builtin"})
    daemon.client.post("/admin/api/models/load", {"model": "builtin"})
    text, warm = daemon.ask(prompt)
    assert (text, warm["disk_tokens"]) == (expected, warm["looked_up_tokens"])
