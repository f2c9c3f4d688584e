"""Count the files and function calls of this project that one streamed chat passes.

    .venv/bin/python -P packaging/request_flow.py

A daemon with the built-in model starts in a temporary folder. Each of its processes imports this module
(as `sitecustomize`) and records its calls between two SIGUSR1. The first chat is not recorded, because it
imports what is imported late.
"""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("app/", "engine/", "kernels/", "ui/")
BACKGROUND = (
    "app/telemetry/", "app/tracing/", "app/lifecycle/", "app/log.py", "app/daemon/",
    "engine/weights/packed_cache/",
)  # fmt: skip
"""Files of tasks and threads that run beside requests. Calls below such a task are not the request's."""
LOG_LINES = ("engine/ipc/client.py", "_Lines.data_received")
"""Reads what an engine logs, which may be of its start."""
PATIENCE_S = 120.0
MAX_TOKENS = 24

Call = tuple[str, str]
"""File and qualified function name."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Files and calls of one streamed chat."""

    files: int
    """Distinct files in the daemon and in the engine that answered."""
    rooms: dict[str, int]
    """Files of each folder of the second level, such as `app/gateway`, most first."""
    calls_in: int
    """Calls in the daemon from the first byte to the message to the engine."""
    functions_in: int
    """Distinct functions among them."""
    calls_back: float
    """Calls in the daemon for each token that streams."""
    calls_step: float
    """Calls in the engine for each token that streams."""


class Recorder:
    """Profile hook of one process: keeps its calls to functions of this project while it is switched on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._on = False
        self._calls: list[Call] = []
        self._known: dict[CodeType, Call | None] = {}

    def install(self) -> None:
        threading.setprofile(self._record)
        sys.setprofile(self._record)
        signal.signal(signal.SIGUSR1, self._switch)
        (self._folder / f"{os.getpid()}.ready").touch()

    def _switch(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signature of handlers
        self._on = not self._on
        if self._on:
            self._write("on", "")
        else:
            self._write("calls", json.dumps(self._calls))

    def _write(self, kind: str, text: str) -> None:
        part = self._folder / f"{os.getpid()}.part"
        part.write_text(text, "utf-8")
        part.rename(part.with_suffix(f".{kind}"))

    def _record(self, frame: FrameType, event: str, arg: Any) -> None:  # noqa: ARG002 - signature of hooks
        if self._on and event == "call" and (call := self._call_of(frame)) and not self._is_background(frame):
            self._calls.append(call)

    def _call_of(self, frame: FrameType) -> Call | None:
        """Name a frame; None for one of other code, of an import or of a comprehension."""
        code = frame.f_code
        if code not in self._known:
            path = os.path.realpath(code.co_filename)
            file = os.path.relpath(path, ROOT)
            inner = code.co_name.startswith("<") and code.co_name != "<lambda>"
            ours = file.startswith(TOPS) and not inner
            self._known[code] = (file, code.co_qualname) if ours else None
        return self._known[code]

    def _is_background(self, frame: FrameType) -> bool:
        """Tell whether the outermost frame of the task or thread belongs to the background."""
        outermost, above = self._call_of(frame), frame.f_back
        while above is not None and above.f_code.co_qualname != "Handle._run":
            outermost = self._call_of(above) or outermost
            above = above.f_back
        return outermost is not None and (outermost[0].startswith(BACKGROUND) or outermost == LOG_LINES)


def measure_flow() -> Flow:
    """Start a daemon, record one streamed chat of the built-in model, stop the daemon."""
    with tempfile.TemporaryDirectory(prefix="llmbox-flow-") as name:
        folder = Path(name)
        with _daemon(folder) as port:
            _chat(port, "What is a KV cache?")
            processes = [int(path.stem) for path in folder.glob("*.ready")]
            _switch_all(folder, processes, "on")
            _chat(port, "What is TTFT?")
            _switch_all(folder, processes, "calls")
        records = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.calls")]
    return summarize([[(file, function) for file, function in calls] for calls in records])


def summarize(processes: list[list[Call]]) -> Flow:
    """Summarize the calls of all processes, each in their order."""
    # A spare engine may load its weights meanwhile: its calls are not the chat's.
    daemon = max(processes, key=lambda calls: len(_places(calls, "EngineClient.send")))
    engine = max(processes, key=lambda calls: len(_places(calls, "Engine.step")))
    way_in = daemon[: _places(daemon, "EngineClient.send")[0]]
    files = {file for calls in (daemon, engine) for file, _ in calls}
    rooms = Counter("/".join(file.split("/")[:2]) for file in files)
    return Flow(
        files=len(files),
        rooms=dict(rooms.most_common()),
        calls_in=len(way_in),
        functions_in=len(set(way_in)),
        calls_back=_calls_between(daemon, "TokenStream.push"),
        calls_step=_calls_between(engine, "Engine.step"),
    )


def _places(calls: list[Call], function: str) -> list[int]:
    """Positions of a function's calls."""
    return [at for at, (_, name) in enumerate(calls) if name == function]


def _calls_between(calls: list[Call], function: str) -> float:
    """Mean number of calls from one call of `function` to the next."""
    places = _places(calls, function)
    return (places[-1] - places[0]) / (len(places) - 1)


@contextlib.contextmanager
def _daemon(folder: Path) -> Iterator[int]:
    """Start a daemon that records; yields its port."""
    hook = folder / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import pathlib, request_flow\nsys.path.pop(0)\n"
        f"request_flow.Recorder(pathlib.Path({str(folder)!r})).install()\n",
        "utf-8",
    )
    kernels = Path(tempfile.gettempdir()) / f"llmbox-test-kernels-{os.geteuid()}"  # the cache of the tests
    environment = {
        "LLMBOX_KERNEL_CACHE": str(kernels),
        **os.environ,
        "LLMBOX_MEMORY_SPARE_ENGINE": "false",  # the recorder begins with an interpreter, not with a fork
        "PYTHONPATH": os.pathsep.join([str(hook), str(ROOT / "packaging/tree")]),
    }
    command = [sys.executable, "-P", "-m", "llmbox", "--data-dir", str(folder / "data")]
    up = subprocess.run(
        [*command, "up", "builtin", "--port", "0", "--json"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        if up.returncode:
            raise RuntimeError(f"the daemon did not start: {up.stderr}")
        yield int(json.loads(up.stdout)["url"].rpartition(":")[2].partition("/")[0])
    finally:
        subprocess.run([*command, "down", "--now"], capture_output=True, check=False)


def _chat(port: int, question: str) -> None:
    """Send one streamed chat and read it to its end."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != http.HTTPStatus.OK or not text.endswith("data: [DONE]\n\n"):
            raise RuntimeError(f"HTTP {answer.status}: {text}")


def _switch_all(folder: Path, processes: list[int], kind: str) -> None:
    """Switch the recorders and wait for each; a process that has ended meanwhile is left out."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    _wait(lambda: all((folder / f"{each}.{kind}").exists() or not _is_alive(each) for each in processes))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the daemon's processes do not answer SIGUSR1")
        time.sleep(0.01)


if __name__ == "__main__":
    print(measure_flow())
