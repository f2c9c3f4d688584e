"""Engine processes: start, exit and queries of one, prewarmed processes, and the limits of a supervisor."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import RankLost
from llmbox.engine.hardware.proc import can_fork
from llmbox.engine.ipc.client import EngineClient, EngineExit
from llmbox.engine.ipc.messages import AskBlocks, LoadFailed, ToDaemon, ToEngine, Vocabulary
from llmbox.engine.ipc.profile_messages import (
    AskProfile,
    AskRows,
    BlockMap,
    EngineAnswer,
    StepProfile,
    WeightRows,
)
from llmbox.engine.ipc.spawn import ForkServer, Launch, SpawnedProcess, spawn

from ..errors import ApiError
from .restart_policy import RestartLimits, WatchLimits, is_stopped, oom_kills

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = logging.getLogger("llmbox.engines")
_LEAST_KV_SHARE: Final = 1 / 16
_LEVELS = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """End of an engine process, with the cause for the log and for clients."""

    cause: str
    from_outside: bool = False
    """The end was caused from outside the engine: no request can be blamed for it."""
    load_failure: LoadFailed | None = None
    is_stuck: bool = False
    """It was killed because it made no progress."""
    is_out_of_memory: bool = False
    """The kernel's OOM killer ended it."""

    def next_config(self, config: EngineConfig) -> EngineConfig:
        """Return the config of the next start: with half the KV pool if memory did not suffice."""
        if not self.is_out_of_memory:
            return config
        share = max(_LEAST_KV_SHARE, config.kv_share / 2)
        log.warning("engine %s is started with %.0f %% of its KV cache from now on", config.name, 100 * share)
        return replace(config, kv_share=share)

    def load_error(self, name: str) -> ApiError:
        """Return the error of a failed load: 400 if the model cannot be served, else 500."""
        failure = self.load_failure
        if failure is not None and failure.code != RankLost.code:
            return ApiError(400, failure.message, code=failure.code)
        cause, code = (self.cause, "engine_error") if failure is None else (failure.message, failure.code)
        text = f"The engine of {name} ended while loading: {cause}."
        return ApiError(500, text, code=code, type="server_error")


def parse_log_line(line: str) -> tuple[int, str]:
    """Parse a log line of an engine (`proc.log_to_stderr`) into (level, message). A line in any other format
    is INFO, unchanged.
    """
    words = line.split(" ", 3)
    if len(words) < 4 or words[2] not in _LEVELS:
        return logging.INFO, line
    logger, _, message = words[3].partition(": ")
    return _LEVELS[words[2]], message if logger.startswith("llmbox.") and message else words[3]


class EngineProcess:
    """Client of one engine process. A restart creates a new one."""

    def __init__(self, name: str, receive: Callable[[ToDaemon], None]) -> None:
        self._name = name
        self._client = EngineClient(receive, self._log_line)
        self.send: Callable[[ToEngine], None] = self._client.send
        """Send a message to the engine. Raises FrameTooLarge."""
        self._has_vocabulary = False
        self._stuck_reason: str | None = None
        self._stopped_from_outside = False
        self._oom_kills = oom_kills()

    def _log_line(self, line: str) -> None:
        level, message = parse_log_line(line)
        log.log(level, "%s | %s", self._name, message)

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Send the bytes of all tokens, once. Raises FrameTooLarge."""
        if not self._has_vocabulary:
            self.send(vocabulary)
            self._has_vocabulary = True

    async def run(
        self,
        spawn: Callable[[], Awaitable[SpawnedProcess]],
        config: EngineConfig,
        launched: Callable[[], None],
    ) -> ProcessExit:
        """Spawn the engine and return when it has ended and everything that it sent was received.

        `launched` is called once the engine has been sent its configuration.
        """
        try:
            await self._client.adopt(await spawn(), config)
        except OSError as error:
            return ProcessExit(cause=f"cannot be started: {error}", from_outside=True)
        launched()
        return self._judge(await self._client.wait())

    @property
    def pid(self) -> int | None:
        return self._client.pid if self._client.alive else None

    def kill_stuck(self, reason: str) -> None:
        """Kill an engine that does not answer. `reason` becomes the cause of its exit."""
        log.error("engine %s: %s", self._name, reason)
        self._stuck_reason = reason
        self._stopped_from_outside = self.pid is not None and is_stopped(self.pid)
        self._client.kill()

    def kill(self) -> None:
        self._client.kill()

    async def end(self, grace: float) -> None:
        """Ask the engine to exit, and kill it after `grace` seconds (0: kill at once)."""
        if not self._client.alive:
            return
        if not grace:
            self._client.kill()
        await self._client.stop(grace)

    def _judge(self, ended: EngineExit) -> ProcessExit:
        if (failure := self._client.load_failure) is not None:
            return ProcessExit(cause=failure.message, from_outside=True, load_failure=failure)
        if self._stuck_reason is not None:
            return ProcessExit(
                cause=self._stuck_reason, from_outside=self._stopped_from_outside, is_stuck=True
            )
        if ended.code == -signal.SIGKILL and ended.transport_error is None:
            # Not killed by us. An OOM kill may be a request's fault, an operator's SIGKILL is not.
            if oom_kills() > self._oom_kills:
                return ProcessExit(cause="killed by the kernel: out of memory", is_out_of_memory=True)
            return ProcessExit(cause=str(ended), from_outside=True)
        return ProcessExit(cause=str(ended))


_Question = AskBlocks | AskProfile | AskRows
_PROFILE_ANSWER_S: Final = 30.0
"""Seconds to wait for a profile: a step of a long prompt comes before it."""
_PROFILE: Final = {True: AskProfile(seconds=600.0), False: AskProfile(seconds=0.0)}
"""Question that starts a profile, and the one that ends it."""
TIMEOUT_S: Final = 2.0
"""Seconds to wait for an answer. If a step takes longer, the query returns None."""


class EngineQueries:
    """Queries of a running engine. Each returns None if the engine is gone or does not answer in time.

    Concurrent callers share one query. A late answer serves the next caller.
    """

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._pending: dict[_Question, asyncio.Future[Any]] = {}
        self._read: dict[AskRows, WeightRows] = {}

    async def blocks(self, seconds: float = TIMEOUT_S) -> BlockMap | None:
        """Return the map of the KV blocks."""
        found: BlockMap | None = await self._ask(AskBlocks(), seconds)
        return found

    async def profile(self, *, is_on: bool) -> StepProfile | None:
        """Start or stop the profile of the engine's steps."""
        found: StepProfile | None = await self._ask(_PROFILE[is_on], _PROFILE_ANSWER_S)
        return found

    async def rows(self, asked: AskRows) -> WeightRows | None:
        """Read rows of weights, once."""
        return self._read.get(asked) or await self._ask(asked, _PROFILE_ANSWER_S)

    async def _ask(self, question: _Question, seconds: float) -> Any:
        if question not in self._pending:
            self._pending[question] = asyncio.get_running_loop().create_future()
            self._send(question)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._pending[question])
        except TimeoutError:
            return None

    def complete(self, answer: EngineAnswer) -> None:
        """Complete the query that this answers."""
        match answer:
            case BlockMap():
                self._settle(AskBlocks(), answer)
            case StepProfile():
                self._settle(_PROFILE[answer.is_on], answer)
            case WeightRows():
                self._read[answer.asked] = answer
                self._settle(answer.asked, answer)

    def drop(self) -> None:
        """Complete all with None: the engine is gone."""
        for question in list(self._pending):
            self._settle(question, None)

    def _settle(self, question: _Question, answer: EngineAnswer | None) -> None:
        if (waiting := self._pending.pop(question, None)) is not None:
            waiting.set_result(answer)


_QUIET_SECONDS: Final = 3.0
"""Seconds without requests before a spare is started: importing takes a core for about a second."""
_PATIENCE: Final = 20
"""Maximum number of times that the start is postponed because requests run."""


class PrewarmedProcess:
    """Source of engine processes. Use it only from the event loop that first used it.

    On a CPU it keeps a fork server, from which each process is forked; with a GPU a process that has imported
    the engine, which the next model takes.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        keep: bool,
        busy: Callable[[], bool] = lambda: False,
        first: SpawnedProcess | ForkServer | None = None,
    ) -> None:
        """`keep`: keep one process ready. `first`: a process that was already started. `busy`: returns True
        while no process should be started.
        """
        self._launch = launch
        self._keep = keep
        self._busy = busy
        self._spare = first
        self._forks = can_fork()
        self._timer: asyncio.TimerHandle | None = None
        self._ahead: asyncio.Task[SpawnedProcess] | None = None
        """Pending fork of `begin`."""
        self._watched: int | None = None
        """File descriptor by which the end of the fork server is noticed."""

    def begin(self) -> None:
        """Fork the process of the next `take` in advance, while room is made for its model."""
        if self._ahead is None and isinstance(self._spare, ForkServer):
            self._ahead = asyncio.create_task(self._fork(self._spare), name="fork ahead")

    def discard_ahead(self) -> None:
        """End the process that `begin` started, if it was not taken."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.cancel():  # else `_fork` ends it
            _discard(ahead)

    async def take(self) -> SpawnedProcess:
        """Fork a process, take the spare, or spawn one. Raises OSError."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            forked = await ahead
            if forked.alive:
                return forked
            forked.discard()
        if self._spare is None and self._keep and self._forks:
            self._spare = ForkServer(self._launch)
        if isinstance(self._spare, ForkServer):
            return await self._fork(self._spare)
        spare, self._spare = self._spare, None
        if self._keep:
            self._later(_PATIENCE)
        if spare is not None:
            if spare.alive:
                return spare
            log.warning("the spare engine process has ended with code %s", spare.process.returncode)
            spare.discard()
        return spawn(self._launch)

    def close(self) -> None:
        self._keep = False
        self.discard_ahead()
        if self._timer is not None:
            self._timer.cancel()
        if isinstance(self._spare, ForkServer):
            self._end_server(self._spare)
        elif self._spare is not None:
            self._spare.discard()
            self._spare = None

    async def _fork(self, server: ForkServer) -> SpawnedProcess:
        """Fork in a thread, and end the process if its caller was cancelled. Spawn one if the fork server
        fails. Raises OSError.
        """
        if self._watched is None:
            self._watched = os.pidfd_open(server.pid)
            asyncio.get_running_loop().add_reader(self._watched, self._end_server, server)
        forking = asyncio.ensure_future(asyncio.to_thread(server.fork))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(_discard)
            raise
        except OSError as error:
            log.warning("no engine process was forked: %s", error)
            self._end_server(server)
            return spawn(self._launch)

    def _end_server(self, server: ForkServer) -> None:
        """Close the fork server, also after it died. Another one is started later, unless this one never
        forked.
        """
        if self._spare is not server:
            return
        self._spare = None
        self._forks = server.has_forked
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
            os.close(self._watched)
            self._watched = None
        server.close()
        if self._keep:
            log.warning("the fork server of engines has ended: another one starts once the daemon is idle")
            self._later(_PATIENCE)

    def _later(self, patience: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._prepare, patience)

    def _prepare(self, patience: int) -> None:
        self._timer = None
        if patience and self._busy():
            self._later(patience - 1)
        elif self._keep and self._spare is None:
            try:
                self._spare = ForkServer(self._launch) if self._forks else spawn(self._launch)
            except OSError as error:
                log.warning("no spare engine process: %s", error)


def _discard(forking: "asyncio.Future[SpawnedProcess]") -> None:
    if not forking.cancelled() and forking.exception() is None:
        forking.result().discard()


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """Limits and dependencies of a supervisor."""

    launch: Launch = field(default_factory=Launch)
    spares: PrewarmedProcess | None = None
    """Source of processes, instead of `launch`."""
    queue_limit: int = 512
    """Open requests beyond those that can run at once."""
    queue_per_key: int = 64
    """Open requests of one tenant that are accepted even if others fill the queue."""
    deaths: RestartLimits = field(default_factory=RestartLimits)
    watch: WatchLimits = field(default_factory=WatchLimits)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Sleep between two starts."""
    on_change: Callable[["Supervisor"], None] = lambda _: None
    """Called after every change of `state`."""
