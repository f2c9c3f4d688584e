"""Supervisor of one model's engine: starts, watches and restarts it, and resumes its open requests.

loading -> ready <-> restarting -> failed -> restarting (one start after a cool-down)      any -> stopped
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import (
    AddRequest,
    EngineStats,
    ModelInfo,
    Ping,
    Pong,
    Progress,
    Ready,
    StepOutputs,
    ToDaemon,
    ToEngine,
    Vocabulary,
)
from llmbox.engine.ipc.profile_messages import AskRows, BlockMap, StepProfile, WeightRows
from llmbox.engine.ipc.spawn import SpawnedProcess, spawn

from ..errors import ApiError
from ..util.formatting import ENGINE_READY, STARTING, format_load_progress
from .admission import FinishRate, QueueReservation, QueueReservations, State, queue_full, refuse_by_state
from .engine_process import EngineProcess, EngineQueries, ProcessExit, SupervisorOptions
from .pair_switch import PairSwitch
from .request_journal import RequestJournal, TokenStream
from .restart_policy import RestartBreaker, RestartPolicy, Watchdog, keep_config, processor_seconds

_STOP_GRACE: Final = 2.0

log = logging.getLogger("llmbox.engines")


class Supervisor:
    """Supervisor of one model. Use it only from the event loop."""

    def __init__(self, config: EngineConfig, options: SupervisorOptions | None = None) -> None:
        self.config = config
        self.admitted = config
        """The configuration with its share of memory."""
        self.name = config.name
        self.state: State = "loading"
        self.cause = STARTING
        """Reason why it is not ready, or last was not. While it loads, the progress as text."""
        self.info: ModelInfo | None = None
        self.stats = EngineStats()
        """Counters of the running engine. They start again with each restart."""
        self.progress: Progress | None = None
        self.vocabulary: Vocabulary | None = None
        """Set before the first request with a grammar. Each engine gets it before its first such request."""
        self.restarts = 0
        self._options = options or SupervisorOptions()
        self._pace = FinishRate(self._options.clock)
        self._watchdog = Watchdog(self, self._options.watch)
        self._requests = RequestJournal(self._send, on_empty=self._rest, on_finish=self._record_finish)
        self.queue = self._requests.queue
        self._reserved = QueueReservations()
        self._queries = EngineQueries(self._send)
        self._process: EngineProcess | None = None
        self._launched = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._died_at = -math.inf
        self._deaths = RestartPolicy(self._options.deaths, self._options.clock)
        self._breaker = RestartBreaker(self._options.deaths, self._options.clock)
        self._half_open = False
        """True while one start is tried after the model was given up."""
        self.readmit: Callable[[EngineConfig], Awaitable[EngineConfig]] = keep_config
        """Called before that start, or one with other options: their memory may be taken. Raises ApiError."""
        self.pair_switch = PairSwitch(self, self._options.clock)

    # ------------------------------------------------------------------ called by the manager and gateway

    async def start(self) -> None:
        """Start the engine and return when the model is ready. Raises ApiError when it cannot be loaded; then
        nothing is left.
        """
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"engine {self.name}")
        await self._started

    async def launched(self) -> None:
        """Wait until the first process was sent its configuration."""
        await self._launched.wait()

    def submit(self, message: AddRequest) -> TokenStream:
        """Open a request. Its id must never have been used. Raises ApiError 429 and 503."""
        self.check_room(1, message.tenant)
        ready = self.state == "ready"
        stream = self._requests.add(message, hand_over=ready)
        if ready and self._requests:
            self._watchdog.watch()
        return stream

    def check_room(self, requests: int, tenant: str = "") -> None:
        """Raise the error that `submit` of so many requests would raise. If other tenants fill the queue, a
        tenant still has some places of its own.
        """
        refuse_by_state(self.name, self.state, self.seconds_to_try)
        assert self.info is not None
        taken = len(self._requests) + self._reserved.places
        room = self.info.max_running + self._options.queue_limit
        if taken + requests <= room:
            return
        own = self._requests.of_tenant[tenant] + self._reserved.of_tenant[tenant]
        if own + requests > min(self._options.queue_per_key, room // 2):
            raise queue_full(self.name, taken, own, self._pace.seconds_to_next())

    def reserve(self, requests: int, tenant: str = "") -> QueueReservation:
        """Reserve places for requests before they are prepared. Release them, then `submit`. Raises as
        `submit`.
        """
        self.check_room(requests, tenant)
        return self._reserved.hold(requests, tenant)

    async def stop(self, code: str = "model_unloaded", message: str = "The model was unloaded.") -> None:
        """Stop the process; open streams end with this error. Idempotent."""
        was_ready = self.state == "ready"
        self._requests.fail_all(code, message)
        if self._task is None or self.state == "stopped":
            return
        self._change("stopped", message)
        self._watchdog.rest()
        self.pair_switch.close()
        self._task.cancel()
        if self._process is not None:  # first: whoever is cancelled here leaves no process
            await self._process.end(_STOP_GRACE if was_ready else 0.0)
        await asyncio.wait({self._task})
        self._fail_start(ApiError(503, message, code=code, type="server_error"))

    async def block_map(self) -> BlockMap | None:
        """Return the map of the KV blocks. None while the engine is not ready or too busy to answer."""
        return await self._queries.blocks() if self.state == "ready" else None

    async def profile_steps(self, *, is_on: bool) -> StepProfile | None:
        """Start or stop the profile of the engine's steps. None as for `block_map`."""
        return await self._queries.profile(is_on=is_on) if self.state == "ready" else None

    async def weight_rows(self, asked: AskRows) -> WeightRows | None:
        """Rows of weights that the engine reads. None as for `block_map`."""
        return await self._queries.rows(asked) if self.state == "ready" else None

    @property
    def open_requests(self) -> int:
        return len(self._requests)

    @property
    def resumed(self) -> int:
        """Number of resumes: requests sent again to a new engine."""
        return self._requests.resumed

    @property
    def pids(self) -> list[int]:
        """Pids of all ranks of a running engine."""
        if self.pid is None:
            return []
        others = [*(self.info.worker_pids if self.info is not None else []), self.stats.prefill_pid]
        return [self.pid, *filter(None, others)]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def load_stage(self) -> str:
        """Current stage of the first load. The tokenizer is read after the engine is ready."""
        return self.problem or ENGINE_READY

    def readiness(self) -> tuple[bool, str]:
        """Return (ready, cause if not)."""
        if self.state != "ready":
            return False, self.problem or self.state
        if self._watchdog.silence:
            return False, f"the engine has not answered for {self._watchdog.silence:.0f} s"
        return True, ""

    @property
    def seconds_to_try(self) -> int | None:
        """Seconds until a model that was given up is started again. None for any other, or if it is not."""
        return self._breaker.seconds_to_try if self.state == "failed" else None

    @property
    def problem(self) -> str:
        """`cause`, with the seconds without progress of a load, or the time until a model that was given up
        starts again.
        """
        silence, seconds = self._watchdog.silence, self.seconds_to_try
        if silence and self.state in {"loading", "restarting"}:
            return f"{self.cause}; it has stood still for {silence:.0f} s"
        return self.cause if seconds is None else f"{self.cause}; it is started again in {seconds} s"

    def retire(self) -> None:
        """Stop supervising a model that was given up, because a new load replaces it."""
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------------ life and death of the process

    async def _run(self) -> None:
        try:
            await self._keep_alive()
        except Exception as error:
            log.exception("the supervision of %s failed", self.name)
            text = f"The engine of {self.name} could not be loaded: an internal error, see the log."
            self._fail_start(ApiError(500, text, code="engine_error", type="server_error"))
            self._breaker.close()
            self._give_up(f"internal error: {error}")

    async def _keep_alive(self) -> None:
        for attempt in itertools.count():
            self._process = EngineProcess(self.name, self._receive)
            death = await self._process.run(self._spawn, self.admitted, self._watch_load)
            self._watchdog.rest()
            self._queries.drop()
            if self.state == "loading":
                if death.is_stuck and not attempt:
                    continue  # one more try: what it waited for may be there by now
                self._change("failed", death.cause)
                self._fail_start(death.load_error(self.name))
                return
            if (planned := self.pair_switch.take_exit(death.cause)) is not None:
                self.admitted = replace(planned, kv_share=self.admitted.kv_share)
                self.stats = EngineStats()
                self._requests.engine_died(from_outside=True)
                continue
            self._died(death)
            if self._half_open:
                await self._cool_down(f"the engine could not be started again: {death.cause}")
            elif self._deaths.too_many:
                times = f"{self._options.deaths.deaths} times in {self._options.deaths.window:.0f} s"
                await self._cool_down(f"the engine died {times}: {death.cause}")
            else:
                await self._options.sleep(self._deaths.pause)

    async def _cool_down(self, cause: str) -> None:
        """Give the engine up. Returns when one start is to be tried, which may be never."""
        while True:
            wait = self._breaker.open()
            self._give_up(cause)
            if wait is None:
                await asyncio.get_running_loop().create_future()
                continue
            await self._options.sleep(wait)
            try:
                admitted = await self.readmit(self.config)
                self.admitted = replace(admitted, kv_share=self.admitted.kv_share)
            except ApiError as error:
                cause = f"the engine could not be started again: {error.message}"
                continue
            self._half_open = True
            log.info("engine %s is started again after %.0f s", self.name, wait)
            self._change("restarting", f"the engine was given up and is being started again: {cause}")
            return

    async def end_engine(self, cause: str) -> None:
        """End the process of a ready model, which is started again as `admitted` says."""
        assert self._process is not None
        self._change("restarting", cause)
        await self._process.end(_STOP_GRACE)

    def _record_finish(self) -> None:
        self._pace.record_finish()
        self._deaths.note_finish()

    def _rest(self) -> None:
        """Note that no request is open."""
        self._watchdog.rest_between_requests()
        if self.config.auto_disaggregate:
            self.pair_switch.note_idle()

    async def _spawn(self) -> SpawnedProcess:
        spares = self._options.spares
        return spawn(self._options.launch) if spares is None else await spares.take()

    def _died(self, death: ProcessExit) -> None:
        log.error("engine %s died: %s", self.name, death.cause)
        self.admitted = death.next_config(self.admitted)
        self.restarts, self.stats = self.restarts + 1, EngineStats()
        now = self._options.clock()
        if now - self._died_at > self._options.deaths.window:
            self._requests.detector.forget()
        self._died_at = now
        guilty = self._requests.engine_died(from_outside=death.from_outside)
        if death.from_outside or not self._requests.detector.narrowed:
            self._deaths.add()
        if guilty is not None:
            self._deaths.forgive(len(self._requests.detector.proven))
            log.error("engine %s: request %s crashed it repeatedly and is given up", self.name, guilty)
        self._change("restarting", f"the engine died and is being restarted: {death.cause}")

    def _fail_start(self, error: ApiError) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    def _give_up(self, cause: str) -> None:
        log.error("engine %s is given up: %s", self.name, cause)
        if self._process is not None:
            self._process.kill()
        self._change("failed", cause)
        self._requests.fail_all("engine_failed", "The engine of this model keeps failing and was stopped.")

    def _change(self, state: State, cause: str) -> None:
        self.state, self.cause = state, cause
        self._options.on_change(self)

    # ------------------------------------------------------------------ messages

    def _receive(self, message: ToDaemon) -> None:
        self._watchdog.got_message = True
        match message:
            case StepOutputs():
                self.stats = message.stats
                self._requests.deliver_step(message)
                if self.config.auto_disaggregate:
                    self.pair_switch.note_step()
            case Pong():
                self.stats = message.stats
            case BlockMap() | StepProfile() | WeightRows():
                self._queries.complete(message)
            case Progress():
                self.progress = message
                if self.state == "loading":
                    self.cause = format_load_progress(message)
            case Ready():
                self._became_ready(message.info)

    def _watch_load(self) -> None:
        self._launched.set()
        self._watchdog.watch(is_loading=True)

    def _became_ready(self, info: ModelInfo) -> None:
        if self.state not in {"loading", "restarting"}:
            return
        self.info = info
        self.admitted = replace(self.admitted, memory_after=())  # other processes may get these numbers
        self.queue.begin(info)
        self.pair_switch.begin()
        self._breaker.close()
        if self._half_open:
            self._half_open = False
            self._deaths.clear()
        self._watchdog.rest()
        first = self.state == "loading"
        self._change("ready", "")
        if first and self._started is not None and not self._started.done():
            self._started.set_result(None)
        if self._requests:
            self._watchdog.watch()
        self._requests.engine_ready()

    def _send(self, message: ToEngine) -> None:
        if self._process is None:
            return
        if isinstance(message, AddRequest) and message.params.needs_vocabulary:
            assert self.vocabulary is not None
            self._process.send_vocabulary(self.vocabulary)
        self._process.send(message)

    # ------------------------------------------------------------------ called by the watchdog

    def ping(self) -> None:
        self._send(Ping(nonce=0))

    def processor_seconds(self) -> float | None:
        """Return the processor seconds of all ranks. None when unknown, or while a thread waits for a disk or
        a core: counts as busy.
        """
        seconds = [processor_seconds(pid) for pid in self.pids]
        return sum(filter(None, seconds)) if seconds and None not in seconds else None

    def kill_stuck(self, reason: str) -> None:
        assert self._process is not None
        self._process.kill_stuck(reason)
