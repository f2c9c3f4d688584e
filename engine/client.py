"""The daemon's end of one engine process: spawn, talk, notice its end, kill. No torch, no policy.

All callbacks run on the event loop that called `EngineClient.start`. Messages arrive in order, and all of
them before `wait` returns: what the engine managed to send before it died counts.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from .config import EngineConfig
from .messages import Shutdown, Start, ToDaemon, ToEngine
from .transport import FrameReader, TransportError, encode

_KEPT_LINES: Final = 20
_LONGEST_LINE: Final = 8192
# A grandchild may hold the pipes open after the engine died; then what has not arrived by now is given up.
_AFTER_EXIT_SECONDS: Final = 0.5
_AFTER_EOF_SECONDS: Final = 2.0

# Secrets stay in the daemon: the engine gets what names places, hardware and maths libraries.
_ENV_NAMES: Final = frozenset(
    {"PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH",
     "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "LLMBOX_KERNELS", "LLMBOX_KERNEL_CACHE"}
)  # fmt: skip
_ENV_PREFIXES: Final = (
    "LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "GOMP_", "KMP_",
    "MKL_", "MALLOC_", "FAKETIME",
)  # fmt: skip
_ENV_DEFAULTS: Final = {
    # OpenMP workers that spin between operations burn a core while idle and double a step beside a second
    # pool: spin for microseconds, then sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


# A log line must not be able to steer the terminal that shows it.
_ESCAPED: Final = {code: f"\\x{code:02x}" for code in (*range(9), *range(10, 32), *range(127, 160))}


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine process; `--fd N --parent PID` is appended."""

    command: tuple[str, ...] = (sys.executable, "-P", "-m", "llmbox.engine.process")
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an engine process ended. `code` is negative for a signal, as in `subprocess`."""

    code: int
    killed: bool
    """By us: `kill` was called, so the signal says nothing about the cause."""
    transport_error: str | None
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        if self.transport_error is not None:
            return f"sent a broken message: {self.transport_error}"
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        last = next((line for line in reversed(self.last_lines) if line.strip()), "")
        return f"exited with code {self.code}" + (f": {last}" if last else "")


class EngineClient:
    def __init__(self, on_message: Callable[[ToDaemon], None], on_log: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_log = on_log
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._exit: asyncio.Future[Exit] | None = None
        self._killed = False
        self._transport_error: str | None = None
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._exit is not None and not self._exit.done()

    async def start(self, launch: Launch, config: EngineConfig) -> None:
        """Spawn the process and send `Start`. Raises OSError if it cannot be spawned."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read_end, write_end = os.pipe()
        try:
            with theirs:
                self._process = _spawn(launch, theirs.fileno(), write_end)
        except BaseException:
            ours.close()
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._exit = loop.create_future()
        pidfd = os.pidfd_open(self._process.pid)
        messages, lines = _Messages(self), _Lines(self._log_line)
        # From here on the process is watched, whatever happens in the awaits below.
        loop.add_reader(pidfd, self._process_ended, pidfd, messages, lines)
        try:
            await loop.connect_read_pipe(lambda: lines, os.fdopen(read_end, "rb", buffering=0))
            ours.setblocking(False)
            self._transport, _ = await loop.create_unix_connection(lambda: messages, sock=ours)
        except BaseException:
            ours.close()
            self.kill()
            raise
        self.send(Start(config=config))

    def send(self, message: ToEngine) -> None:
        """Queue a message. Dropped if the engine is gone. Raises FrameTooLarge, then nothing was sent."""
        frame = encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def wait(self) -> Exit:
        """The end of the process, after its last message and log line."""
        assert self._exit is not None
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """SIGKILL the process and its children at once. `wait` tells when it is over."""
        self._killed = True
        self._signal_group()

    async def stop(self, grace: float) -> Exit:
        """Ask it to end, and kill it after `grace` seconds."""
        self.send(Shutdown())
        try:
            return await asyncio.wait_for(self.wait(), grace)
        except TimeoutError:
            self.kill()
            return await self.wait()

    def _signal_group(self) -> None:
        if self._process is not None and self._process.returncode is None:
            # The process leads its own group, and until it is reaped nobody else can get the number.
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()

    def _receive(self, message: ToDaemon) -> None:
        self._on_message(message)

    def _broken(self, error: TransportError) -> None:
        if self._transport_error is None and not self._killed:
            self._transport_error = str(error)
            self._signal_group()

    def _connection_ended(self) -> None:
        """The engine closed its end: it is ending, or has lost its mind."""
        asyncio.get_running_loop().call_later(_AFTER_EOF_SECONDS, self._signal_group)

    def _log_line(self, line: str) -> None:
        self._last_lines.append(line)
        self._on_log(line)

    def _process_ended(self, pidfd: int, messages: "_Messages", lines: "_Lines") -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        self._signal_group()  # its children, while the number is still ours
        code = self._process.wait()
        self._finishing = loop.create_task(self._finish(code, messages, lines))

    async def _finish(self, code: int, messages: "_Messages", lines: "_Lines") -> None:
        assert self._exit is not None
        await asyncio.wait({messages.ended, lines.ended}, timeout=_AFTER_EXIT_SECONDS)
        messages.close()
        lines.close()
        self._exit.set_result(
            Exit(
                code=code,
                killed=self._killed,
                transport_error=self._transport_error,
                last_lines=tuple(self._last_lines),
            )
        )


class _Messages(asyncio.Protocol):
    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._reader: FrameReader[ToDaemon] = FrameReader(ToDaemon)
        self._transport: asyncio.BaseTransport | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            for message in self._reader.feed(data):
                self._client._receive(message)  # noqa: SLF001 - the other half of the client
        except TransportError as error:
            self._client._broken(error)  # noqa: SLF001
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.ended.done():
            self.ended.set_result(None)
        self._client._connection_ended()  # noqa: SLF001

    def close(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
        if self._transport is not None:
            self._transport.close()


class _Lines(asyncio.Protocol):
    """stderr and stdout of the engine, line by line; an endless line is cut."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(line)
        if len(self._rest) > _LONGEST_LINE:
            self._emit(self._rest)
            self._rest = b""

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._rest:
            self._emit(self._rest)
        if not self.ended.done():
            self.ended.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _emit(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode("utf-8", errors="replace")
        self._on_line(text.translate(_ESCAPED))


def _spawn(launch: Launch, fd: int, log_fd: int) -> subprocess.Popen[bytes]:
    """Blocks for the milliseconds of vfork + exec; never forks a threaded Python."""
    return subprocess.Popen(  # noqa: S603 - the command is ours
        [*launch.command, "--fd", str(fd), "--parent", str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=(fd,),
        env=_environment(launch.env),
        start_new_session=True,
    )


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _ENV_NAMES or name.startswith(_ENV_PREFIXES)
    }
    return _ENV_DEFAULTS | inherited | dict(extra)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
