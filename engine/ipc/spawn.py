"""Processes of the engine: spawned and forked before it is known what model they load, without an event loop;
and jobs in a subprocess that report their progress, one JSON object per line on standard output.

A job first reports such as {"progress": [done, total]}, or {"compiling": [steps done, steps]} while the CPU
kernels are compiled. The last line is {"report": ...} or {"error": {"code", "message"}}.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from llmbox.kernels.cpu.build import compile_progress

from ..errors import EngineError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# Secrets stay in the daemon: the engine inherits only variables for paths, hardware and math libraries.
_ENV_NAMES: Final = frozenset(
    {"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH",
     "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "LLMBOX_KERNELS", "LLMBOX_KERNEL_CACHE",
     "LLMBOX_RANKS"}
)  # fmt: skip
_ENV_PREFIXES: Final = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "MALLOC_", "FAKETIME",
)  # fmt: skip
_ENV_DEFAULTS: Final = {
    # OpenMP workers that spin between operations use a core while idle, and double the time of a step next to
    # a second pool: spin for microseconds, then sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """Command and extra environment of an engine process; `--fd N --parent PID` is appended."""

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "llmbox.engine.process.engine_main")
    env: Mapping[str, str] = field(default_factory=dict)


class ForkedProcess:
    """Forked child of this process, with the methods of `subprocess.Popen` that are used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status as Popen does. Raises TimeoutExpired after `timeout` seconds."""
        if timeout is not None and self.poll() is None:
            self._await_end(timeout)
        self._reap(0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _await_end(self, seconds: float) -> None:
        ended, poll = os.pidfd_open(self.pid), select.poll()
        try:
            poll.register(ended, select.POLLIN)
            if not poll.poll(seconds * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", seconds)
        finally:
            os.close(ended)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(frozen=True, slots=True)
class SpawnedProcess:
    """Engine process that imports its modules and then waits for `Start` on `channel`."""

    process: "subprocess.Popen[bytes] | ForkedProcess"
    channel: socket.socket
    log: int
    """File descriptor to read its standard output and error from."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def discard(self) -> None:
        """Kill a process that no client has adopted, and close its channel and log."""
        self.channel.close()
        os.close(self.log)
        if self.alive:  # not reaped, so the number is still its own
            kill_group(self.process)
            self.process.wait()


def kill_group(process: "subprocess.Popen[bytes] | ForkedProcess") -> None:
    """Kill a process that was not reaped yet, and its group, which it leads soon after it has begun."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def spawn(launch: Launch) -> SpawnedProcess:
    """Spawn an engine process. Raises OSError.

    Blocks for the milliseconds of vfork + exec; never forks a threaded Python. The kernel kills the process
    when the calling thread ends.
    """
    with _open_ends() as (ours, theirs, read_end, write_end):
        process = subprocess.Popen(  # noqa: S603 - the command is ours
            [*launch.command, "--fd", str(theirs), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            pass_fds=(theirs,),
            env=_environment(launch.env),
            start_new_session=True,
        )
    return SpawnedProcess(process, ours, read_end)


@contextlib.contextmanager
def _open_ends() -> Iterator[tuple[socket.socket, int, int, int]]:
    """Open a socket pair and the pipe of a log: our end, that of a new process, where we read and it writes.
    Its ends are closed behind the block; ours where the block fails.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    read_end, write_end = os.pipe()
    try:
        with theirs:
            yield ours, theirs.fileno(), read_end, write_end
    except BaseException:
        ours.close()
        os.close(read_end)
        raise
    finally:
        os.close(write_end)


PID_BYTES: Final = 4
_ANSWER_S: Final = 10.0
_IMPORT_S: Final = 120.0
"""Seconds to wait for a fork, and for the first one, which waits for the imports."""


class ForkServer:
    """Process that imports the engine once and forks engine processes: `process/engine_main.py --forks`."""

    def __init__(self, launch: Launch) -> None:
        """Start the server. Raises OSError."""
        self._server = spawn(replace(launch, command=(*launch.command, "--forks")))
        self._lock = threading.Lock()
        self.has_forked = False

    def fork(self) -> SpawnedProcess:
        """Fork an engine process. Blocks for milliseconds, the first time until the imports are done. Raises
        OSError; then the server is of no more use.
        """
        with _open_ends() as (ours, theirs, read_end, write_end), self._lock:
            pid = self._ask(theirs, write_end)
        self.has_forked = True
        return SpawnedProcess(ForkedProcess(pid), ours, read_end)

    @property
    def pid(self) -> int:
        return self._server.process.pid

    def close(self) -> None:
        """End the server. The processes that it forked go on."""
        self._server.process.kill()  # first, so that a thread in `fork` reads the end
        with self._lock:
            self._server.discard()

    def _ask(self, *files: int) -> int:
        channel = self._server.channel
        channel.settimeout(_ANSWER_S if self.has_forked else _IMPORT_S)
        socket.send_fds(channel, [b"\0"], files)
        try:
            answer = channel.recv(PID_BYTES)
        except TimeoutError:
            self._server.process.kill()
            self._server.process.wait()
            answer = channel.recv(PID_BYTES)  # it may have forked at the last moment
        pid = int.from_bytes(answer, "little", signed=True)
        if not pid:
            raise OSError("the fork server has ended")
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return pid


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)
    }
    return _ENV_DEFAULTS | inherited | dict(extra)


ReportProgress = Callable[[dict[str, Any]], None]


def run_job(work: "Callable[[ReportProgress], DataclassInstance]") -> int:
    """Run `work`, write its report or error, and return the exit status of the process."""
    compile_progress.set(lambda done, total: report({"compiling": [done, total]}))
    try:
        result = work(report)
    except (EngineError, OSError, ValueError) as error:
        report({"error": {"code": getattr(error, "code", "failed"), "message": str(error)}})
        return 1
    report({"report": asdict(result)})
    return 0


def report(message: dict[str, Any]) -> None:
    """Write one message as a line of JSON, and flush it."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
