"""Prefill engine of a pair: a process of its own, started, watched and replaced by the decode engine."""

import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from llmbox.kernels.cpu.isa import pick_cores

from ..config import EngineConfig
from ..errors import EngineError, ParallelError
from ..hardware.proc import read_state
from ..ipc.channel import DaemonChannel, DaemonGone, FrameTooLarge, TransportError
from ..ipc.messages import LoadFailed, Progress, Ready, Start, ToDaemon, ToEngine
from ..ipc.spawn import Launch

log = logging.getLogger("llmbox.engine")

MOST_DEATHS: Final = 5
"""Deaths within `WINDOW_SECONDS` after which no other engine is started."""
WINDOW_SECONDS: Final = 60.0
PAUSE_SECONDS: Final = 1.0
"""Time between a second death and the next start."""
SILENT_SECONDS: Final = 5.0
"""Time between two looks at an engine that owes an answer."""
_END_SECONDS: Final = 2.0


class PrefillFailed(EngineError):  # noqa: N818 - named for what happened
    """Prefill engine could not be loaded."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the prefill engine: {message}")
        self.code = code


class PrefillProcess:
    """`PrefillLink` to a process. Use it from the thread that made it: the process ends with that thread."""

    def __init__(
        self,
        cores: Sequence[int],
        segment: int,
        launch: Launch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the first process, which imports its modules and waits for `load`."""
        self.deaths = 0
        self.is_ready = self.is_given_up = False
        self._cores, self._segment = list(cores), segment
        self._launch = launch or Launch()
        self._clock = clock
        self._config: EngineConfig | None = None
        self._died: deque[float] = deque(maxlen=MOST_DEATHS)
        self._start_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: LoadFailed | None = None
        self._spawn()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def load(self, config: EngineConfig, progress: Callable[[Progress], None]) -> None:
        """Have the model loaded, and return when the engine is ready. Raises PrefillFailed."""
        self._config = config
        if self._process is not None:
            self._send(Start(config=config))
        while not self.is_ready:
            for message in self.receive(is_waiting=True):
                if isinstance(message, Progress):
                    progress(message)
            if self.deaths:
                failure = self._failure or LoadFailed(
                    code=EngineError.code,
                    message="it ended while loading, by the kernel if memory ran out: load with less "
                    "--memory, a shorter --ctx or quantized weights (--quant int8)",
                )
                self.close()
                raise PrefillFailed(failure.code, failure.message)
            self.wait(1.0)

    def send(self, message: ToEngine) -> None:
        if self.is_ready:
            self._send(message)

    def _send(self, message: ToEngine) -> None:
        try:
            self._channel.send(message)
        except DaemonGone:
            pass  # `receive` finds out, after it has read what the engine sent before
        except FrameTooLarge:
            log.exception("a message to the prefill engine is too large")

    def receive(self, *, is_waiting: bool) -> list[ToDaemon]:
        """Return what has arrived, and replace an engine that ended or hangs."""
        if self._process is None:
            if self._config is not None and not self.is_given_up and self._clock() >= self._start_at:
                self._spawn()
                self._send(Start(config=self._config))
            return []
        messages: list[ToDaemon] = []
        with self._end_noticed():
            messages = self._channel.receive(block=False)
        for message in messages:
            if isinstance(message, Ready):
                self.is_ready = self._process is not None
            elif isinstance(message, LoadFailed):
                self._failure = message
        if messages or not is_waiting:
            self._heard_at, self._ticks = self._clock(), -1
        elif self._process is not None and self._clock() - self._heard_at > SILENT_SECONDS:
            self._look()
        return messages

    @contextmanager
    def _end_noticed(self) -> Iterator[None]:
        try:
            yield
        except DaemonGone:
            self._end("it ended")
        except TransportError as error:
            self._end(f"it sent an invalid message: {error}")

    def _look(self) -> None:
        """End an engine that has used no processor time since the last look, nor waits for the machine."""
        assert self._process is not None
        state, before = read_state(self._process.pid), self._ticks
        self._heard_at = self._clock()
        if state is not None:
            self._ticks = state.ticks
            if state.ticks == before and not state.waits_for_machine:
                self._end("it does not answer and uses no processor time")

    def wait(self, seconds: float) -> None:
        if self._process is None:
            time.sleep(seconds)
        else:
            self._channel.wait(seconds)

    def close(self) -> None:
        """End the process, and start no other."""
        self.is_given_up = True
        self.is_ready = False
        self._kill()

    def _end(self, reason: str) -> None:
        """Note that the engine is gone, and when the next one starts."""
        code = self._kill()
        how = f"signal {-code}" if code < 0 else f"code {code}"
        now = self._clock()
        self.deaths += 1
        self.is_ready = False
        self._died.append(now)
        self._start_at = now + (PAUSE_SECONDS if len(self._died) > 1 else 0.0)
        log.error("the prefill engine is gone (%s): %s", how, reason)
        if len(self._died) == MOST_DEATHS and now - self._died[0] < WINDOW_SECONDS:
            self.is_given_up = True
            log.error(
                "the prefill engine died %d times in %.0f s: the decode engine computes prompts from now on, "
                "until the model is loaded again",
                MOST_DEATHS,
                WINDOW_SECONDS,
            )

    def _kill(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(0.0 if process.poll() is None else _END_SECONDS)
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_END_SECONDS)
        return -signal.SIGKILL

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [*self._launch.command, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        with theirs, self._on_its_cores():
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), self._segment)
            )
        self._channel = DaemonChannel(ours)
        self._heard_at, self._ticks = self._clock(), -1

    @contextmanager
    def _on_its_cores(self) -> Iterator[None]:
        """Run this thread on the cores that a process is to inherit."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class EnginePair:
    """Prefill engine that starts beside this decode engine."""

    link: PrefillProcess
    handle: int
    """Descriptor of the hand-over segment, which is empty until the size of blocks is known."""
    cores: tuple[int, ...]
    """Cores of the prefill engine."""


def start_pair(sizes: tuple[int, int]) -> EnginePair:
    """Start the process of a prefill engine, and run this one on cores of its own."""
    prefill, decode = sizes
    cores = pick_cores(prefill + decode)
    if len(cores) < prefill + decode:
        raise ParallelError(
            f"--disaggregate {prefill}:{decode} needs {prefill + decode} cores, and this process may use "
            f"{len(cores)}: ask for fewer"
        )
    handle = os.memfd_create("llmbox-handover", os.MFD_CLOEXEC)
    link = PrefillProcess(cores[:prefill], handle)
    os.sched_setaffinity(0, cores[prefill:])
    return EnginePair(link, handle, tuple(cores[:prefill]))
