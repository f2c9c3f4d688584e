"""The daemon under the soak: what it must be like again after every fault."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmbox.app.admin_client import Client
from llmbox.app.config.paths import find_paths
from llmbox.app.lifecycle.instance import read_pid_file

from .traffic import Traffic, ask

PATIENCE = 180.0
"""Seconds until something that should come in few counts as missed; other programs may have the cores."""
DESCRIPTORS = 16
"""More than before a fault may be open: caches of connections, files of the log's reader."""


class BrokenError(Exception):
    """The pass rule does not hold."""


class SoakBox:
    def __init__(self, folder: Path, requests: int) -> None:
        self.paths = find_paths(folder / "data")
        self.url = ""
        self.expected: list[str] = []
        self.traffic: Traffic | None = None
        self._requests = requests
        self._port = "0"
        self._engines: set[int] = set()
        self._last_engine = 0
        self._descriptors = 0

    def up(self) -> None:
        self._llmbox("up", "builtin", "--port", self._port)
        running = read_pid_file(self.paths)
        assert running is not None
        self.url, self._port = running.url, str(running.port)
        self.until(self.is_ready, "/ready")

    def down(self) -> None:
        self._llmbox("down", "--now")

    def remember(self) -> None:
        """The undisturbed answers, and what is open at rest."""
        self.expected = [self._answer(number) for number in range(self._requests)]
        self._descriptors = self._open_descriptors()

    def _answer(self, number: int) -> str:
        text = ask(self.url, number, stream=False)
        if text is None:
            raise BrokenError("a request at rest was refused")
        return text

    # ---- what is there

    def daemon_pid(self) -> int:
        running = read_pid_file(self.paths)
        assert running is not None
        return running.pid

    def engine_pid(self) -> int:
        self.until(lambda: self._engine() is not None, "an engine")
        self._last_engine = self._engine() or 0
        self._engines.add(self._last_engine)
        return self._last_engine

    def restarted_engine_pid(self) -> int | None:
        return None if (pid := self._engine()) == self._last_engine else pid

    def _engine(self) -> int | None:
        here = self.daemon_pid()
        return next((pid for pid, title in _children(here) if title == "llmbox: engine builtin"), None)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=PATIENCE) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    @staticmethod
    def is_alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def log_size(self) -> int:
        return self.paths.log_file.stat().st_size

    # ---- the pass rule

    def quiet(self) -> None:
        assert self.traffic is not None
        if not self.traffic.rest():
            raise BrokenError("an accepted request has no answer")

    def check(self, log_from: int, word: str) -> None:
        """Ready again, all answered, same tokens, no block, no descriptor, no orphan, and the log has it."""
        self.quiet()
        assert self.traffic is not None
        self.until(self.is_ready, "/ready")
        if self.traffic.wrong:
            raise BrokenError("; ".join(self.traffic.wrong[:3]))
        for number, expected in enumerate(self.expected):
            if self._answer(number) != expected:
                raise BrokenError(f"control request {number} gives other tokens")
        self.until(lambda: self._model()["stats"]["blocks_used"] == 0, "all blocks given back")
        self.until(self._descriptors_are_few, f"at most {self._descriptors + DESCRIPTORS} descriptors")
        now = self.engine_pid()
        self.until(lambda: not any(map(self.is_alive, self._engines - {now})), "the end of old engines")
        with self.paths.log_file.open("rb") as log:
            log.seek(log_from if log_from <= self.log_size() else 0)
            if word.encode() not in log.read():
                raise BrokenError(f"the log does not say {word!r}")

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise BrokenError(f"not within {PATIENCE:.0f} s: {what}")
            time.sleep(0.05)

    def _model(self) -> Any:
        return Client(self.paths).get("/admin/api/status")["models"][0]

    def _open_descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.daemon_pid()}/fd").iterdir())

    def _descriptors_are_few(self) -> bool:
        return self._open_descriptors() <= self._descriptors + DESCRIPTORS

    def _llmbox(self, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "llmbox", "--data-dir", str(self.paths.data_dir), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise BrokenError(f"llmbox {words[0]} ended with {done.returncode}: {done.stderr}")


def _children(parent: int) -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            title = (folder / "cmdline").read_bytes().rstrip(b"\0 ").decode(errors="replace")
        except OSError:
            continue
        if fields[1] == str(parent) and fields[0] != "Z":
            yield int(folder.name), title
