"""What the kernel says of a process or a thread: whether it waits, was stopped, how much it has computed."""

import atexit
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn


@dataclass(frozen=True, slots=True)
class ProcessState:
    letter: str
    """R (runs, or waits for a core), S, D (waits for a disk), T (stopped), Z."""
    ticks: int
    """Processor time, in the system's clock ticks (mostly hundredths of a second)."""

    @property
    def seconds(self) -> float:
        """Processor time."""
        return self.ticks / os.sysconf("SC_CLK_TCK")

    @property
    def is_stopped(self) -> bool:
        return self.letter == "T"

    @property
    def waits_for_machine(self) -> bool:
        """For a disk, or for a core that others have: it goes on by itself."""
        return self.letter in {"D", "R"}


def read_state(pid: int) -> ProcessState | None:
    """None for a process that is gone."""
    return _read(Path(f"/proc/{pid}/stat"))


def thread_states(pid: int) -> list[ProcessState]:
    """Of each thread; empty for a process that is gone."""
    try:
        folders = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [state for folder in folders if (state := _read(folder / "stat")) is not None]


def _read(path: Path) -> ProcessState | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name may have spaces in it
    return ProcessState(fields[0], int(fields[11]) + int(fields[12]))


# Of two processes of ours the kernel should take the engine: the daemon can start it again.
_OOM_SCORE_ADJ: Final = "500"
_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("llmbox.engine")


def bind_to_parent(parent: int) -> None:
    """Killed when the parent's thread that started us ends. Raises SystemExit if it is gone already."""
    os.umask(0o077)
    # Ctrl-C and systemd's SIGTERM reach the whole group; the daemon drains and tells us when to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ, encoding="ascii")
        except OSError as error:
            log.debug("oom_score_adj stays as it is: %s", error)
    if os.getppid() != parent:  # it died before prctl could watch it
        raise SystemExit(0)


def log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


_unfinished: list[Callable[[], None]] = []


def before_end(task: Callable[[], None]) -> None:
    """`task` bounds its own time: whoever asked the process to end kills it after a while."""
    if not _unfinished:
        atexit.register(finish)
    _unfinished.append(task)


def finish() -> None:
    """All of it, once, the latest first."""
    while _unfinished:
        _unfinished.pop()()


def end(code: int) -> NoReturn:
    """Of the process, without Python's own end: threads of gloo and NCCL do not survive that, and NCCL would
    wait there for graphs that nobody gives up any more.
    """
    finish()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
