"""The daemon under the soak: what it must be like again after every fault."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llmbox.app.admin_client import Client
from llmbox.app.config.paths import find_paths
from llmbox.app.lifecycle.instance import read_pid_file

from .models import ADAPTERS, SETTINGS, make_adapters, make_models, picture_url
from .traffic import SoakRequest, Traffic, ask, make_request, make_requests

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
        self.requests = make_requests(requests, picture_url())
        self.expected: list[str] = []
        self.big: tuple[SoakRequest, str] | None = None
        """Request of the model that pushes others out, and its answer."""
        self.traffic: Traffic | None = None
        self.seen: Counter[str] = Counter()
        """What the KV caches and the memory did."""
        self._folder = folder
        self._port = "0"
        self._engines: set[int] = set()
        self._last_engine = 0
        self._descriptors = 0
        self._from_disk: dict[int, int] = {}
        """Tokens that each engine has read from the KV cache on disk, by its pid."""

    def fill(self) -> None:
        """Write the settings, and add models and adapters."""
        self.paths.config_file.parent.mkdir(parents=True, exist_ok=True)
        self.paths.config_file.write_text(SETTINGS)
        for name, folder in make_models(self._folder / "models").items():
            self._llmbox("adopt", str(folder), "--name", name)
        for name, folder in make_adapters(self._folder / "adapters").items():
            self._llmbox("lora", "add", name, str(folder), "--base", "tiny")

    def up(self) -> None:
        self._llmbox("up", "builtin", "--port", self._port)
        running = read_pid_file(self.paths)
        assert running is not None
        self.url, self._port = running.url, str(running.port)
        self.until(self.is_ready, "/ready")

    def down(self) -> None:
        self._llmbox("down", "--now")

    def remember(self) -> None:
        """Note the undisturbed answers, and what is open at rest."""
        self.expected = [self.answer(request) for request in self.requests]
        for name in ADAPTERS:  # or they would prove nothing
            plain = {self.answer(make_request(number, "tiny", "")) for number in range(3)}
            if plain == {self.answer(make_request(number, name, "")) for number in range(3)}:
                raise BrokenError(f"the adapter {name} changes no answer")
        self._descriptors = self._open_descriptors()
        big = make_request(0, "big", "")
        self.big = big, self.answer(big)

    def answer(self, request: SoakRequest) -> str:
        """Return the answer to a request while nobody else asks. Others may have to leave memory for it."""
        answers: list[str] = []

        def is_answered() -> bool:
            text = ask(self.url, request, stream=False)
            answers.extend([] if text is None else [text])
            return text is not None

        self.until(is_answered, f"an answer of {request.model} at rest")
        return answers[0]

    # ---- what is there

    def daemon_pid(self) -> int:
        running = read_pid_file(self.paths)
        assert running is not None
        return running.pid

    def engine_pid(self) -> int:
        self.until(self._find_engine, "an engine")
        self._last_engine = self._find_engine() or 0
        self._engines.add(self._last_engine)
        return self._last_engine

    def restarted_engine_pid(self) -> int | None:
        return None if (pid := self._find_engine()) == self._last_engine else pid

    def engines(self) -> dict[str, int]:
        """Return the engines that have a model, by its name."""
        begin = "llmbox: engine "
        found = {
            title.removeprefix(begin): pid
            for pid, title in _children(self.daemon_pid())
            if title.startswith(begin)
        }
        known = {name: pid for name, pid in found.items() if name in {"builtin", "tiny", "eye", "big"}}
        self._engines.update(known.values())
        return known

    def _find_engine(self) -> int | None:
        return self.engines().get("builtin")

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
        for request, expected in zip(self.requests, self.expected, strict=True):
            if self.answer(request) != expected:
                raise BrokenError(f"control request {request.number} of {request.model} gives other tokens")
        if self.traffic.overtaken.most > self.traffic.fair:
            raise BrokenError(f"a request was overtaken by {self.traffic.overtaken.most} of its model")
        self.until(self._blocks_are_free, "all blocks given back")
        self.until(self._descriptors_are_few, f"at most {self._descriptors + DESCRIPTORS} descriptors")
        self.until(self._old_engines_have_ended, "the end of old engines")
        self._count()
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

    def _models(self) -> list[Any]:
        found: list[Any] = Client(self.paths).get("/admin/api/status")["models"]
        return [model for model in found if model.get("stats")]

    def _blocks_are_free(self) -> bool:
        return all(model["stats"]["blocks_used"] == 0 for model in self._models())

    def _old_engines_have_ended(self) -> bool:
        now = set(self.engines().values())
        return not any(map(self.is_alive, self._engines - now))

    def _count(self) -> None:
        """Note what engines have read from disk, as long as they live."""
        engines = self.engines()
        for model in self._models():
            if (pid := engines.get(model["name"])) is not None:
                self._from_disk[pid] = model["stats"]["disk_hits"]
        self.seen["tokens read from the KV cache on disk"] = sum(self._from_disk.values())

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
