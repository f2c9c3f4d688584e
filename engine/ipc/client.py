"""Client of one engine process in the daemon: send and receive messages, detect its exit, kill it.

All callbacks run on the event loop that called `EngineClient.adopt`. Messages arrive in order, and all of
them before `wait` returns, including those that the engine sent just before it died.
"""

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..config import EngineConfig
from .channel import FrameReader, TransportError, encode
from .messages import LoadFailed, Shutdown, Start, ToDaemon, ToEngine
from .spawn import ForkedProcess, SpawnedProcess, kill_group

_KEPT_LINES: Final = 20
_LONGEST_LINE: Final = 8192
# A grandchild may hold the pipes open after the engine died; output that arrives later than this is dropped.
_AFTER_EXIT_SECONDS: Final = 0.5
_AFTER_EOF_SECONDS: Final = 2.0

# A log line must not be able to steer the terminal that shows it.
_ESCAPED: Final = {code: f"\\x{code:02x}" for code in (*range(9), *range(10, 32), *range(127, 160))}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExit:
    """Exit of an engine process. `code` is negative for a signal, as in `subprocess`."""

    code: int
    killed: bool
    """True if `kill` was called, so that the signal says nothing about the cause."""
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
    """Connection to one engine process, from its adoption to its exit."""

    def __init__(self, on_message: Callable[[ToDaemon], None], on_log: Callable[[str], None]) -> None:
        self.on_message = on_message
        self._on_log = on_log
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._transport: asyncio.Transport | None = None
        self._exit: asyncio.Future[EngineExit] | None = None
        self._killed = False
        self._transport_error: str | None = None
        self.load_failure: LoadFailed | None = None
        """Message with which the engine gave up loading."""
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._exit is not None and not self._exit.done()

    async def adopt(self, spawned: SpawnedProcess, config: EngineConfig) -> None:
        """Take over a spawned process and send `Start`. If it has exited already, `wait` returns its exit."""
        loop = asyncio.get_running_loop()
        self._process = spawned.process
        self._exit = loop.create_future()
        pidfd = os.pidfd_open(self._process.pid)
        messages, lines = _Messages(self), _Lines(self._log_line)
        # From here on the process is watched, whatever happens in the awaits below.
        loop.add_reader(pidfd, self._process_ended, pidfd, messages, lines)
        try:
            await loop.connect_read_pipe(lambda: lines, os.fdopen(spawned.log, "rb", buffering=0))
            spawned.channel.setblocking(False)
            self._transport, _ = await loop.create_unix_connection(lambda: messages, sock=spawned.channel)
        except BaseException:
            spawned.channel.close()
            self.kill()
            raise
        self.send(Start(config=config))

    def send(self, message: ToEngine) -> None:
        """Queue a message; dropped if the engine is gone. Raises FrameTooLarge and then sends nothing."""
        frame = encode(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    async def wait(self) -> EngineExit:
        """Wait for the exit of the process, after its last message and log line."""
        assert self._exit is not None
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """Send SIGKILL to the process and its children. `wait` returns when they are gone."""
        self._killed = True
        self._signal_group()

    async def stop(self, grace: float) -> EngineExit:
        """Send `Shutdown`, and kill the process after `grace` seconds."""
        self.send(Shutdown())
        try:
            async with asyncio.timeout(grace):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()
        except asyncio.CancelledError:
            self.kill()  # nobody waits for a process that hangs any more
            raise

    def _signal_group(self) -> None:
        if self._process is not None and self._process.returncode is None:
            # The process leads its own group, and its number is not reused until it is reaped.
            kill_group(self._process)

    def _broken(self, error: TransportError) -> None:
        if self._transport_error is None and not self._killed:
            self._transport_error = str(error)
            self._signal_group()

    def _connection_ended(self) -> None:
        """Handle EOF: the engine is exiting, or is broken and is killed after a delay."""
        asyncio.get_running_loop().call_later(_AFTER_EOF_SECONDS, self._signal_group)

    def _log_line(self, line: str) -> None:
        self._last_lines.append(line)
        self._on_log(line)

    def _process_ended(self, pidfd: int, messages: "_Messages", lines: "_Lines") -> None:
        assert self._process is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        self._signal_group()  # its children, while the number is not reused
        code = self._process.wait()
        self._finishing = loop.create_task(self._finish(code, messages, lines))

    async def _finish(self, code: int, messages: "_Messages", lines: "_Lines") -> None:
        assert self._exit is not None
        await asyncio.wait({messages.ended, lines.ended}, timeout=_AFTER_EXIT_SECONDS)
        messages.close()
        lines.close()
        self._exit.set_result(
            EngineExit(
                code=code,
                killed=self._killed,
                transport_error=self._transport_error,
                last_lines=tuple(self._last_lines),
            )
        )


class _Messages(asyncio.Protocol):
    """Message stream from the engine."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._on_message = client.on_message
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
                if isinstance(message, LoadFailed):
                    self._client.load_failure = message
                self._on_message(message)
        except TransportError as error:
            self._client._broken(error)  # noqa: SLF001 - the other half of the client
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
    """Standard output and error of the engine, line by line; a line of more than 8 KiB is split."""

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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
