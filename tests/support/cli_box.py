"""A box of its own for command-line tests: a data folder, the fake engine, and no trace left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.admin_client import Client
from llmbox.app.config.paths import find_paths
from llmbox.app.lifecycle.instance import RunningDaemon, is_locked, read_pid_file
from llmbox.engine.hardware.proc import read_state
from llmbox.kernels.cpu.isa import KERNEL_CACHE
from support.fake_engine import write_model
from support.fork_server import ForkedProcess, needs_interpreter
from support.tokenizers_zoo import byte_level, write_text_files

FAKE_CLI = Path(__file__).with_name("fake_cli.py")
Child = subprocess.Popen[str] | ForkedProcess
PATIENCE = 180.0
"""Seconds until a condition that should come in milliseconds counts as missed."""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class PatientClient(Client):
    """A daemon that still imports on a busy machine is waited for."""

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path, None, PATIENCE)

    def post(self, path: str, body: object, timeout: float | None = PATIENCE) -> dict[str, Any]:
        return self._call("POST", path, body, timeout)


class Box:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths = find_paths(folder / "data")
        self.client = PatientClient(self.paths)
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("LLMBOX_") or name == KERNEL_CACHE
            },
            "HF_HOME": str(folder / "hf"),
            "LLMBOX_MEMORY_SPARE_ENGINE": "false",
            "LLMBOX_SERVER_PORT": "0",
            "TERM": "dumb",
        }
        self._children: list[Child] = []

    def command(self, *arguments: object) -> list[str]:
        return [
            sys.executable,
            "-P",
            str(FAKE_CLI),
            "--data-dir",
            str(self.paths.data_dir),
            *map(str, arguments),
        ]

    def run(self, *arguments: object, stdin: str | None = None, **environ: str) -> Result:
        child, limit = self._start(arguments, stdin, environ), 300
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
        assert not err.startswith("Traceback"), err
        assert "\nTraceback" not in err, err
        return Result(child.wait(), out, err)

    def spawn(self, *arguments: object, **environ: str) -> "Child":
        child = self._start(arguments, None, environ)
        self._children.append(child)
        return child

    def _start(self, arguments: tuple[object, ...], stdin: str | None, environ: Mapping[str, str]) -> "Child":
        env = {**self.environ, **environ}
        with tempfile.TemporaryFile("w+") as given:
            given.write(stdin or "")
            given.seek(0)
            if not needs_interpreter(env):
                own = ["--data-dir", str(self.paths.data_dir), *map(str, arguments)]
                return ForkedProcess(own, env, given.fileno())
            return subprocess.Popen(
                self.command(*arguments),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=env,
            )

    def serve(self, *arguments: object, **environ: str) -> "Child":
        """A daemon in the foreground whose API answers and whose models are ready."""
        child = self.spawn("serve", *arguments, **environ)
        until(lambda: child.poll() is not None or self.is_ready())
        assert child.poll() is None, child.communicate()
        return child

    def api(self, name: str) -> dict[str, Any]:
        """An answer of the admin API, without the price of a process."""
        return self.client.get(f"/admin/api/{name}")

    def is_ready(self) -> bool:
        return self.client.is_up() and self.api("status")["ready"]

    def model(self, name: str = "tiny", **options: Any) -> Path:
        folder = self.folder / "models" / name
        write_text_files(folder, byte_level())
        return write_model(folder, **{"declared_vocab": 480, **options})

    @property
    def running(self) -> RunningDaemon | None:
        return read_pid_file(self.paths) if is_locked(self.paths.lock_file) else None

    def close(self) -> None:
        if (running := self.running) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, signal.SIGKILL)
        for child in self._children:
            child.kill()
            child.communicate(timeout=PATIENCE)
        until(lambda: not is_locked(self.paths.lock_file))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the awaited did not happen"
        time.sleep(0.02)


def interrupt(process: "Child | subprocess.Popen[bytes]") -> None:
    """Ctrl-C, once the process waits for something or is gone, as it is when a person presses it.

    readline sees a signal when its wait for a key is broken: one that comes before, but after the prompt,
    is seen with the next key only.
    """
    until(lambda: (state := read_state(process.pid)) is not None and state.letter in "SZ")
    process.send_signal(signal.SIGINT)


def is_alive(pid: int) -> bool:
    """Zombies are dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    subject = Box(tmp_path)
    yield subject
    subject.close()
