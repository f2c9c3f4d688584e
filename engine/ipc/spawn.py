"""Spawning of engine processes, before it is known what model they load. No event loop."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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


@dataclass(frozen=True, slots=True)
class SpawnedProcess:
    """Engine process that imports its modules and then waits for `Start` on `channel`."""

    process: "subprocess.Popen[bytes]"
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def spawn(launch: Launch) -> SpawnedProcess:
    """Spawn an engine process. Raises OSError.

    Blocks for the milliseconds of vfork + exec; never forks a threaded Python. The kernel kills the process
    when the calling thread ends.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    read_end, write_end = os.pipe()
    try:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - the command is ours
                [*launch.command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=(theirs.fileno(),),
                env=_environment(launch.env),
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return SpawnedProcess(process, ours, read_end)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)
    }
    return _ENV_DEFAULTS | inherited | dict(extra)
