"""One model's engine: started, watched, restarted, and its open requests carried over.

The supervisor remembers for each open request its prompt, parameters and every token that arrived
(`TokenStream`). When the engine dies, another one is started and gets them all again with their tokens so
far, in order of arrival. No token is lost or doubled: outputs count in the order of one socket, all
that the dead engine managed to send is read before the next one starts, and noise depends on (seed, position)
alone, so the next engine draws what the dead one would have drawn.

loading -> ready <-> restarting -> failed          any -> stopped
"""

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from llmbox.engine.client import EngineClient, Exit, Launch
from llmbox.engine.config import EngineConfig
from llmbox.engine.messages import (
    AbortRequest,
    AddRequest,
    EngineStats,
    LoadFailed,
    ModelInfo,
    Ping,
    Pong,
    Progress,
    Ready,
    RequestOutput,
    StepOutputs,
    ToDaemon,
)
from llmbox.engine.transport import FrameTooLarge

from ..errors import ApiError
from .admission import Pace, State, queue_full, refuse_by_state
from .deaths import DeathLimits, Deaths
from .token_stream import TokenStream
from .trial import Trial
from .watchdog import Watchdog, WatchLimits, is_stopped, oom_kills, processor_seconds

_STOP_GRACE: Final = 2.0

log = logging.getLogger("llmbox.engines")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    launch: Launch = field(default_factory=Launch)
    queue_limit: int = 512
    """Open requests beyond those that can run at once."""
    deaths: DeathLimits = field(default_factory=DeathLimits)
    watch: WatchLimits = field(default_factory=WatchLimits)
    clock: Callable[[], float] = time.monotonic
    on_change: Callable[["Supervisor"], None] = lambda _: None
    """Called after every change of `state`."""


class Supervisor:
    def __init__(self, config: EngineConfig, options: SupervisorOptions | None = None) -> None:
        self.config = config
        self.admitted = config
        """The same with its share of memory."""
        self.name = config.name
        self.state: State = "loading"
        self.cause = ""
        """Why it is not ready, or why it last was not."""
        self.info: ModelInfo | None = None
        self.stats = EngineStats()
        """Of the running engine: its counters start again with each restart."""
        self.progress: Progress | None = None
        self.restarts = 0
        self.resumed = 0
        """Requests carried over, each time one is."""
        self._options = options or SupervisorOptions()
        self._open: dict[str, TokenStream] = {}
        self._in_engine: dict[str, None] = {}
        """Handed over and not ended by the engine yet, in that order; cancelled ones too."""
        self._interrupted: set[str] = set()
        """Was in an engine that died and has not been handed to the next one yet."""
        self._client: EngineClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._load_failure: LoadFailed | None = None
        self._stuck: str | None = None
        self._from_outside = False
        self._oom_kills = 0
        self._died_at = -math.inf
        self._trial = Trial()
        self._deaths = Deaths(self._options.deaths, self._options.clock)
        self._watchdog = Watchdog(self, self._options.watch)
        self._pace = Pace(self._options.clock)

    # ------------------------------------------------------------------ what the manager and gateway call

    async def start(self) -> None:
        """Returns when the model is ready. Raises ApiError when it cannot be loaded; then nothing is left."""
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"engine {self.name}")
        await self._started

    def submit(self, message: AddRequest) -> TokenStream:
        """Open a request. Its id must never have been used. Raises ApiError 429 and 503."""
        self.check_room(1)
        assert message.request_id not in self._open
        stream = TokenStream(message, self._cancel)
        self._open[message.request_id] = stream
        self._idle.clear()
        held = self._trial.hold(message.request_id)
        if self.state == "ready":
            self._watchdog.watch()
            if not held:
                self._send([message.request_id])
        return stream

    def check_room(self, requests: int) -> None:
        """Raises what `submit` of so many requests would."""
        refuse_by_state(self.name, self.state)
        assert self.info is not None
        if len(self._open) + requests > self.info.max_running + self._options.queue_limit:
            raise queue_full(self.name, len(self._open), self._pace.seconds_to_next())

    async def stop(self, code: str = "model_unloaded", message: str = "The model was unloaded.") -> None:
        """End the process; open streams end with this error. Idempotent."""
        was_ready = self.state == "ready"
        self._fail_all(code, message)
        if self._task is None or self.state == "stopped":
            return
        self._change("stopped", message)
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._end_process(_STOP_GRACE if was_ready else 0.0)
        if self._started is not None and not self._started.done():
            self._started.set_exception(ApiError(503, message, code=code, type="server_error"))

    def fail_open(self, code: str, message: str) -> None:
        """End every open stream with this error; the engine drops them."""
        for request_id in self._open:
            self._tell(AbortRequest(request_id=request_id))
        self._fail_all(code, message)

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def pid(self) -> int | None:
        return self._client.pid if self._client is not None and self._client.alive else None

    def readiness(self) -> tuple[bool, str]:
        """(ready, cause if not)."""
        if self.state != "ready":
            return False, self.cause or self.state
        if self._watchdog.silence:
            return False, f"the engine has not answered for {self._watchdog.silence:.0f} s"
        return True, ""

    # ------------------------------------------------------------------ life and death of the process

    async def _run(self) -> None:
        try:
            await self._keep_alive()
        except Exception as error:
            log.exception("the supervision of %s failed", self.name)
            self._give_up(f"internal error: {error}")

    async def _keep_alive(self) -> None:
        while True:
            cause = await self._live_once()
            if self.state == "loading":
                self._load_failed(cause)
                return
            self._died(cause)
            if self._deaths.too_many:
                limits = self._options.deaths
                self._give_up(f"the engine died {limits.deaths} times in {limits.window:.0f} s: {cause}")
                return
            await asyncio.sleep(self._deaths.pause)

    async def _live_once(self) -> str:
        """Run one engine process to its end and say how it ended."""
        self._in_engine.clear()
        self._load_failure = self._stuck = None
        self._from_outside = False
        self._oom_kills = oom_kills()
        client = EngineClient(self._receive, self._log_line)
        self._client = client
        try:
            await client.start(self._options.launch, self.admitted)
        except OSError as error:
            self._from_outside = True
            return f"cannot be started: {error}"
        ended = await client.wait()
        self._watchdog.rest()
        return self._judge(ended)

    def _judge(self, ended: Exit) -> str:
        if self._load_failure is not None:
            self._from_outside = True
            return self._load_failure.message
        if self._stuck is not None:
            return self._stuck
        if ended.code == -signal.SIGKILL and ended.transport_error is None:
            # Not by us. The kernel's choice may be a request's fault, an operator's is not.
            if oom_kills() > self._oom_kills:
                return "killed by the kernel: out of memory"
            self._from_outside = True
        return str(ended)

    def _died(self, cause: str) -> None:
        log.error("engine %s died: %s", self.name, cause)
        self.restarts += 1
        self.stats = EngineStats()
        self._deaths.add()
        now = self._options.clock()
        if now - self._died_at > self._options.deaths.window:
            self._trial.forget()
        self._died_at = now
        self._interrupted |= self._in_engine.keys() & self._open.keys()
        if self._from_outside:
            self._trial.interrupted()
        else:
            self._convict(self._trial.crashed(list(self._in_engine)))
        self._change("restarting", f"the engine died and is being restarted: {cause}")

    def _convict(self, guilty: str | None) -> None:
        if guilty is None:
            return
        self._deaths.explained()
        log.error("engine %s: request %s brought it down repeatedly and is given up", self.name, guilty)
        stream = self._close(guilty)
        if stream is not None:
            stream.fail("engine_error", "The engine failed repeatedly on this request.")

    def _load_failed(self, cause: str) -> None:
        self._change("failed", cause)
        failure = self._load_failure
        assert self._started is not None
        if self._started.done():
            return
        if failure is not None:
            error = ApiError(400, failure.message, code=failure.code)
        else:
            text = f"The engine of {self.name} ended while loading: {cause}."
            error = ApiError(500, text, code="engine_error", type="server_error")
        self._started.set_exception(error)

    def _give_up(self, cause: str) -> None:
        log.error("engine %s is given up: %s", self.name, cause)
        if self._client is not None:
            self._client.kill()
        self._change("failed", cause)
        self._fail_all("engine_failed", "The engine of this model keeps failing and was stopped.")

    async def _end_process(self, grace: float) -> None:
        if self._client is None or not self._client.alive:
            return
        if not grace:
            self._client.kill()
        await self._client.stop(grace)

    def _change(self, state: State, cause: str) -> None:
        self.state, self.cause = state, cause
        self._options.on_change(self)

    # ------------------------------------------------------------------ messages

    def _receive(self, message: ToDaemon) -> None:
        self._watchdog.heard()
        match message:
            case StepOutputs():
                self.stats = message.stats
                for output in message.outputs:
                    self._deliver(output)
            case Pong():
                self.stats = message.stats
            case Progress():
                self.progress = message
            case LoadFailed():
                self._load_failure = message
            case Ready():
                self._became_ready(message.info)

    def _became_ready(self, info: ModelInfo) -> None:
        if self.state not in {"loading", "restarting"}:
            return
        self.info = info
        first = self.state == "loading"
        self._change("ready", "")
        if first and self._started is not None and not self._started.done():
            self._started.set_result(None)
        if self._open:
            self._watchdog.watch()
            self._send(self._trial.begin(list(self._open)))

    def _deliver(self, output: RequestOutput) -> None:
        request_id = output.request_id
        stream = self._open.get(request_id)
        if output.finish_reason is not None:
            self._in_engine.pop(request_id, None)
            if stream is not None:
                self._close(request_id)
                self._pace.finished()
        if stream is not None:
            stream.push(output)
        if self._trial.open:
            self._send(
                self._trial.delivered(request_id, len(output.token_ids))
                if output.finish_reason is None
                else self._trial.ended(request_id)
            )

    def _send(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            stream = self._open.get(request_id)
            if stream is None:
                continue
            assert request_id not in self._in_engine
            try:
                self._tell(stream.message(self._in_engine))
            except FrameTooLarge:
                self._close(request_id)
                stream.fail("request_too_large", "The request is too large for the engine.")
                self._send(self._trial.ended(request_id))
                continue
            self._in_engine[request_id] = None
            if request_id in self._interrupted:
                self._interrupted.remove(request_id)
                stream.resumes += 1
                self.resumed += 1

    def _cancel(self, stream: TokenStream) -> None:
        request_id = stream.request.request_id
        self._close(request_id)
        if request_id in self._in_engine:
            self._tell(AbortRequest(request_id=request_id))
        stream.push(RequestOutput(request_id=request_id, finish_reason="abort"))

    def _close(self, request_id: str) -> TokenStream | None:
        self._trial.withdrawn(request_id)
        self._interrupted.discard(request_id)
        stream = self._open.pop(request_id, None)
        if not self._open:
            self._idle.set()
            self._watchdog.rest()
        return stream

    def _fail_all(self, code: str, message: str) -> None:
        for request_id in list(self._open):
            stream = self._close(request_id)
            assert stream is not None
            stream.fail(code, message)

    def _tell(self, message: AddRequest | AbortRequest | Ping) -> None:
        if self._client is not None:
            self._client.send(message)

    def _log_line(self, line: str) -> None:
        log.info("%s | %s", self.name, line)

    # ------------------------------------------------------------------ what the watchdog calls

    def ping(self) -> None:
        self._tell(Ping(nonce=0))

    def processor_seconds(self) -> float | None:
        return processor_seconds(self.pid) if self.pid is not None else None

    def stuck(self, reason: str) -> None:
        assert self._client is not None
        log.error("engine %s: %s", self.name, reason)
        self._stuck = reason
        self._from_outside = self.pid is not None and is_stopped(self.pid)
        self._client.kill()
