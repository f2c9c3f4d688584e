"""Instance of a running daemon: the lock that makes it the only one, and its pid file."""

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ..config.paths import Paths
from ..errors import CliError, Exit

_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - names that nobody connects to


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDaemon:
    """Contents of the pid file. `started_at` is Unix seconds."""

    pid: int
    host: str
    port: int
    socket: str
    started_at: float
    version: str
    certificate: str = ""
    """Path of the certificate; empty: plain HTTP."""

    @property
    def url(self) -> str:
        host = _REACHED_AT.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self.certificate else 'http'}://{host}:{self.port}"


class InstanceLock:
    """Context manager that holds the lock. Entering raises CliError (exit 9) with the other daemon's pid and
    port.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._handle = -1
        self.leftover: RunningDaemon | None = None
        """Pid file of an earlier daemon that could not clean up."""

    def __enter__(self) -> Self:
        self._handle = os.open(self._paths.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not self._take():
            os.close(self._handle)
            raise already_running(read_pid_file(self._paths))
        self.leftover = read_pid_file(self._paths)
        self._paths.socket_file.unlink(missing_ok=True)
        return self

    def _take(self) -> bool:
        """Try to lock, with retries: `is_locked` of another process holds the lock for an instant."""
        for _ in range(15):
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                return True
        return False

    def announce(self, running: RunningDaemon) -> None:
        """Replace the pid file atomically, so that readers never see half of it."""
        temporary = self._paths.pid_file.with_suffix(".new")
        temporary.touch(0o600)
        temporary.write_text(json.dumps(asdict(running)) + "\n")
        temporary.replace(self._paths.pid_file)

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for file in (self._paths.pid_file, self._paths.socket_file, self._paths.sign_in_file):
            file.unlink(missing_ok=True)
        os.close(self._handle)


def is_locked(lock_file: Path) -> bool:
    """Return whether a daemon holds the lock now."""
    try:
        handle = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def find_running(paths: Paths, patience: float = 1.0) -> RunningDaemon | None:
    """Find the daemon that holds the lock. One that just started gets a moment to write its pid file."""
    deadline = time.monotonic() + patience
    while is_locked(paths.lock_file):
        running = read_pid_file(paths)
        if running is not None and _alive(running.pid):
            return running
        if time.monotonic() > deadline:
            raise CliError(
                "a daemon starts or stops",
                f"{paths.lock_file} is locked, but {paths.pid_file} is empty",
                "try again, or look into llmbox logs",
                Exit.CONFLICT,
                str(paths.log_file),
            )
        time.sleep(0.02)
    return None


def read_pid_file(paths: Paths) -> RunningDaemon | None:
    """Read the pid file. None if it is missing or damaged."""
    try:
        return RunningDaemon(**json.loads(paths.pid_file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def already_running(other: RunningDaemon | None) -> CliError:
    """Error (exit 9) of a second daemon."""
    where = f"pid {other.pid}, port {other.port}" if other else "its pid file is not written yet"
    return CliError(
        "another daemon runs on these files",
        where,
        "use it (llmbox status), stop it (llmbox down), or choose another --data-dir",
        Exit.CONFLICT,
    )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
