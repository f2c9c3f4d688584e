"""Process utilities: state and CPU time of processes and threads, binding to the parent, orderly exit."""

import atexit
import ctypes
import gc
import logging
import os
import platform
import select
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

log = logging.getLogger("llmbox.engine")

EXIT_SECONDS: Final = 3.0
"""Most seconds to wait for the engines that leave for another one, which their daemon kills after two."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Scheduling state and CPU time of a process or thread, from /proc."""

    letter: str
    """State: R (runs, or waits for a core), S (sleeps), D (waits for a disk), T (stopped), Z (zombie)."""
    ticks: int
    """CPU time in clock ticks (mostly hundredths of a second)."""

    @property
    def seconds(self) -> float:
        """CPU time in seconds."""
        return self.ticks / os.sysconf("SC_CLK_TCK")

    @property
    def is_stopped(self) -> bool:
        return self.letter == "T"

    @property
    def waits_for_machine(self) -> bool:
        """True if it waits for a disk or a busy core, so that it continues without intervention."""
        return self.letter in {"D", "R"}


def read_state(pid: int) -> ProcessState | None:
    """Return the state of a process; None if it is gone."""
    return _read(Path(f"/proc/{pid}/stat"))


def thread_states(pid: int) -> list[ProcessState]:
    """Return the state of each thread of a process; empty if it is gone."""
    try:
        folders = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [state for folder in folders if (state := _read(folder / "stat")) is not None]


def family_of(pid: int) -> list[int]:
    """Return a process and its descendants, itself first. Those that end just now may be missing."""
    found = [pid]
    for parent in found:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, file.read_text(encoding="ascii").split())
            except OSError:  # the thread has ended
                continue
    return found


def await_exits(pids: Iterable[int], seconds: float) -> None:
    """Wait until these processes have ended and their memory is free, for `seconds` at most."""
    end = time.monotonic() + seconds
    for pid in pids:
        try:
            ended = os.pidfd_open(pid)
        except OSError:  # it is gone, or the system has no such descriptors
            continue
        try:
            select.select([ended], [], [], max(0.0, end - time.monotonic()))
        finally:
            os.close(ended)


def bytes_from_disk(pid: int) -> int:
    """Return how much a process has read from disks so far; 0 if it is gone or the kernel does not count."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def waits_for_file_lock(pids: Iterable[int]) -> bool:
    """Return whether one of the processes waits for a lock on a file that another process holds."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    # 7: -> FLOCK  ADVISORY  WRITE 4711 fe:01:1835 0 EOF
    waiting = {line.split()[5] for line in lines if " -> " in line}
    return not waiting.isdisjoint(map(str, pids))


def _read(path: Path) -> ProcessState | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name may have spaces in it
    return ProcessState(fields[0], int(fields[11]) + int(fields[12]))


# When memory is out, the kernel should kill the engine and not the daemon, which can start it again.
_OOM_SCORE_ADJ: Final = "500"
_PR_SET_PDEATHSIG: Final = 1


def bind_to_parent(parent: int) -> None:
    """Make the kernel kill this process when the parent thread that started it ends. Also ignores SIGINT and
    SIGTERM, and makes the process the OOM killer's first choice. Raises SystemExit if the parent is gone.
    """
    os.umask(0o077)
    # Ctrl-C and systemd's SIGTERM reach the whole group; the daemon drains and sends `Shutdown`.
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


_M_MMAP_THRESHOLD: Final = -3  # of malloc.h
_LARGE_BLOCK: Final = 1 << 20


def map_large_blocks() -> None:
    """Make glibc give each block of 1 MiB or more pages of its own, which go back when it is freed. Otherwise
    it raises this bound to 32 MiB as such blocks are freed, and keeps them between small ones.
    """
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def trim_heap() -> None:
    """Return the free pages of the C heap to the kernel: every thread's arena keeps its own."""
    with suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


_CRASHED: Final = 70  # EX_SOFTWARE
_STDERR: Final = 2
_CLONE_PARENT: Final = 0x8000
_SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_PINS: Final = frozenset({"OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})
NVIDIA_FILES: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files that exist where CUDA may find a GPU: the Linux driver's, and that of WSL 2."""


def can_fork() -> bool:
    """Tell whether engine processes may be forked (`fork_sibling`). Not where there may be a GPU: CUDA does
    not outlive a fork. Nor where OpenMP pins threads: it would pin the process that was forked from.
    """
    is_known = sys.platform == "linux" and platform.machine() in _SYS_CLONE
    return is_known and not any(map(Path.exists, NVIDIA_FILES)) and not _PINS & os.environ.keys()


def num_threads() -> int:
    """Return the number of threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def fork_child(run: Callable[[], int], keep: Collection[int]) -> int:
    """Fork a child, which ends with the exit status that `run` returns; return its pid.

    Of this process it has the imports and the environment, but no files other than the standard ones and
    `keep`, no context variables and no tasks of `at_exit`. This process must have no other threads. Raises
    OSError.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else both processes would write what waits there
    pid = os.fork()
    if pid:
        return pid
    code = _CRASHED
    try:
        gc.freeze()  # shares memory with the parent, and keeps objects whose files are closed here
        _unfinished.clear()
        for fd in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
            if fd > _STDERR and fd not in keep:
                with suppress(OSError):  # that of the listing is gone
                    os.close(fd)
        code = Context().run(run)
    except SystemExit:
        code = 0  # the parent is gone: `bind_to_parent`
    except BaseException:
        log.exception("a forked process stops after an error")
    finally:
        exit_process(code)


def fork_sibling() -> int:
    """Fork as `os.fork` does, but as a child of the parent of this process: that one can wait for it, and
    its end is noticed by `bind_to_parent`. This process must have no other threads: the C library is not told
    of the fork, so that locks of other threads would stay taken. Raises OSError.
    """
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    numbers = (_SYS_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = libc.syscall(*map(ctypes.c_long, numbers))
    if not pid:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return pid


def log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


_unfinished: list[Callable[[], None]] = []


def at_exit(task: Callable[[], None]) -> None:
    """Register a task to run before the process exits. The task must bound its own time, because the process
    is killed if it takes too long to exit.
    """
    if not _unfinished:
        atexit.register(finish)
    _unfinished.append(task)


def finish() -> None:
    """Run the registered tasks once, the latest first."""
    while _unfinished:
        _unfinished.pop()()


def exit_process(code: int) -> NoReturn:
    """Exit the process without Python's finalization: threads of gloo and NCCL crash in it, and NCCL would
    wait there for CUDA graphs that are not released.
    """
    finish()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
