"""One simulated run: the daemon's parts as they are, in virtual time, with clients and faults of a scenario."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from llmbox.app.config.settings import Settings
from llmbox.app.control.memory_estimate import Sizes
from llmbox.app.control.model_scheduler import ModelScheduler, SchedulerDeps
from llmbox.app.engines import engine_process, restart_policy
from llmbox.app.engines.eviction import MemoryRequest
from llmbox.app.engines.manager import EngineManager
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from llmbox.app.events import Events
from llmbox.app.gateway.gateway import Gateway
from llmbox.app.gateway.generation import Generation
from llmbox.app.gateway.open_request import OpenRequest
from llmbox.app.metrics.metrics import Metrics
from llmbox.app.models.catalog import ModelRef
from llmbox.app.models.registry import Registry
from llmbox.app.store import RequestLog
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc import client, engine_channel
from llmbox.engine.ipc import spawn as spawn_module
from llmbox.engine.process import engine_main
from llmbox.engine.sampling_params import SamplingParams

from .engine import BrokenRuleError, run_engine
from .machine import Death, Machine, ProcessKilled, VirtualProcess
from .rules import check_after, check_failed_state, check_kills, check_log, check_outcomes, check_records, check_rest, check_room
from .scenario import MODEL_BYTES, MachineEvent, RequestSetup, Scenario, draw_scenario
from .virtual_loop import StuckError, VirtualClock, VirtualLoop

PATIENCE = 40_000.0
"""Virtual seconds within which everything must have ended."""


@dataclass(slots=True)
class Outcome:
    """What a client got."""

    request: RequestSetup
    arrived: float = 0.0
    status: str = ""
    """`done`, `left` or `error`; empty: nothing."""
    error: ApiError | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    ended: float = 0.0
    is_open: bool = False
    """The gateway took it."""
    open_choices: int = 0
    """Choices of all requests that were open or had a place when this one was refused."""
    prompt_logprobs: list[int] | None = None
    token_times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class SimulationReport:
    """Result of one run."""

    seed: int
    weather: str
    broken: str
    """Rule that does not hold; empty if all do."""
    digest: str
    virtual_s: float
    requests: int
    deaths: int
    outcomes: dict[str, int]


class StubText:
    """Text side of a model: each token is one letter."""

    warnings = ()
    generation_defaults: dict[str, float] = {}

    def beside_embedding(self, _: int) -> "StubText":
        return self

    def detokenizer(self, **_: Any) -> Any:
        return SimpleNamespace(push=lambda token: chr(48 + token), finish=str)

    def close(self) -> None:
        return


class World:
    """Daemon, machine and clients of one run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.chance = Random(scenario.seed ^ 0x5EED)
        self.clock = VirtualClock()
        self.loop = VirtualLoop(self.clock)
        self.setups = {setup.name: setup for setup in scenario.models}
        self.machine = Machine(self.loop, self.chance, self._program)
        self.machine.mean_latency = scenario.latency
        self.machine.capacity = scenario.capacity
        self.machine.on_death = self._note_death
        self.log: list[tuple[float, int, str]] = []
        self.trace = sha256()
        self.outcomes = {request.id: Outcome(request) for request in scenario.requests}
        self.cancelled: set[str] = set()
        self.unloads = 0
        self.must_be_logged: list[tuple[str, Death, Supervisor]] = []
        self.failed_at: list[tuple[str, float]] = []
        self.is_closing = False
        self.is_drained_early = False
        self.blames_nobody = scenario.blames_nobody
        self.broken = ""
        self.fault_kinds = {kind for setup in scenario.models for kind in setup.step_faults.values()}
        self.fault_kinds |= {event.kind for event in scenario.events}
        self.opened: dict[str, OpenRequest] = {}
        self.reserved: dict[str, RequestSetup] = {}
        """Requests that have a place in a queue and are not submitted yet."""

    # ------------------------------------------------------------------ set-up

    def build(self) -> None:
        scenario = self.scenario
        settings = Settings()
        settings = replace(
            settings,
            model=replace(settings.model, device="cpu"),
            memory=replace(settings.memory, ttl=scenario.ttl or 0.0),
            limits=replace(settings.limits, queue=scenario.queue_limit),
        )
        self.engines = EngineManager(
            lambda _: StubText(),  # type: ignore[arg-type,return-value]
            queue_limit=scenario.queue_limit,
            queue_per_key=scenario.queue_per_key,
            keep_spare=scenario.keep_spare,
            on_change=self._note_state,
            supervise=lambda config, options: Supervisor(config, replace(options, clock=self.loop.time)),
        )
        deps = SchedulerDeps(
            settings=lambda: settings,
            find=lambda name: ModelRef(name, folder() / name, "hub") if name in self.setups else None,
            registry=Registry(folder() / "models.json"),
            clock=self.loop.time,
            device=lambda _: "cpu",
            budgets=lambda *_: (scenario.memory,),
            sizes=lambda *_: Sizes(
                "cpu", (MemoryRequest((0,), MODEL_BYTES, MODEL_BYTES),), (scenario.memory,)
            ),
        )
        self.events = Events()
        self.residency = ModelScheduler(self.engines, self.events, deps)
        self.request_log = RequestLog(folder() / "requests.db")
        self.gateway = Gateway(self.engines, self.request_log, metrics(), settings)

    def config(self, name: str) -> EngineConfig:
        return EngineConfig(model_path=str(folder() / name), name=name, device="cpu")

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Put the virtual machine under the product's code."""
        machine, clock = self.machine, self.clock
        handler = _LogHandler(self)
        logger = logging.getLogger("llmbox")
        nothing = SimpleNamespace(freeze=lambda: None, enable=lambda: None)
        before = logger.propagate, logger.level
        with ExitStack() as stack:
            for module, name, value in (
                (time, "monotonic", clock.monotonic),
                (time, "perf_counter", clock.monotonic),
                (time, "time", clock.time),
                (client, "os", machine.os),
                (spawn_module, "os", machine.os),
                (engine_process, "spawn", machine.spawn),
                (engine_process, "oom_kills", lambda: machine.oom_kills),
                (restart_policy, "read_state", machine.read_state),
                (restart_policy, "thread_states", machine.thread_states),
                (engine_channel, "select", machine.select),
                (engine_main, "gc", nothing),
                (engine_main, "setproctitle", lambda _: None),
            ):
                stack.enter_context(patch.object(module, name, value))
            logger.addHandler(handler)
            logger.propagate = False
            logger.setLevel(logging.INFO)
            try:
                yield
            finally:
                logger.removeHandler(handler)
                logger.propagate, level = before
                logger.setLevel(level)

    def _program(self, process: VirtualProcess) -> int:
        return run_engine(process, self.machine, self.setups)

    # ------------------------------------------------------------------ the run

    async def run(self) -> None:
        self.build()
        scenario = self.scenario
        if scenario.weather != "models":
            for name in self.setups:
                model = await self.engines.load(self.config(name))
                self.residency.keep(model, ttl=scenario.ttl)
        self.note("ready")
        self.start = self.loop.time()
        clients = [asyncio.create_task(self._client(request)) for request in scenario.requests]
        events = asyncio.create_task(self._play_events())
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*clients)
        events.cancel()
        await asyncio.wait({events})
        self._end_faults()
        if not self.is_closing:
            while self.engines.loading():
                await asyncio.sleep(1.0)
            await self._ask_control()
            await asyncio.sleep(5.0)
            check_rest(self)
            if scenario.ttl is not None:
                await asyncio.sleep(scenario.ttl + 10.0)
                if left := [m.name for m in self.engines.models() if m.supervisor.state == "ready"]:
                    raise BrokenRuleError(f"idle models stay in memory: {left}")
        await self._close()
        check_after(self)

    def finish(self) -> None:
        """Judge what clients got, once everything has ended."""
        check_outcomes(self)
        check_records(self)
        check_kills(self)
        check_log(self)

    async def _client(self, request: RequestSetup) -> None:
        await asyncio.sleep(request.at)
        outcome = self.outcomes[request.id]
        outcome.arrived = self.loop.time()
        task = asyncio.create_task(self._serve(request, outcome))
        timer = None
        if request.leaves_at is not None:
            timer = self.loop.call_later(request.leaves_at, task.cancel)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                outcome.status = "left"
            elif (error := task.exception()) is not None:
                if not isinstance(error, ApiError):
                    raise BrokenRuleError(f"{request.id} ends with {error!r}") from error
                outcome.status, outcome.error = "error", error
        finally:
            outcome.ended = self.loop.time()
            if timer is not None:
                timer.cancel()
        told = "" if outcome.error is None else outcome.error.code
        self.note(f"{request.id} {outcome.status} {told} {outcome.tokens} {outcome.reasons}")

    async def _serve(self, request: RequestSetup, outcome: Outcome) -> None:
        """One request as a route handles it: model, place in the queue, prompt, submission, stream."""
        now = self.loop.time()
        model = await self.residency.find(request.model)
        outcome.open_choices = self.count_open(request.model)
        reservation = model.supervisor.reserve(request.n, request.tenant)
        self.reserved[request.id] = request
        try:
            await asyncio.sleep(request.preparing)
        finally:
            del self.reserved[request.id]
        generation = Generation(
            id=request.id,
            endpoint="/v1/completions",
            model=model,
            prompts=[request.prompt],
            params=request.params,
            max_tokens=request.max_tokens,
            n=request.n,
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=request.salt,
            stream=True,
            reservation=reservation,
            finish_by=None if request.finish_after is None else now + request.finish_after,
            first_token_by=None if request.first_token_after is None else now + request.first_token_after,
            still_authorized=None
            if request.is_revoked_at is None
            else lambda: self.loop.time() < now + request.is_revoked_at,
        )
        outcome.open_choices = before = self.count_open(request.model)
        own = self.count_open(request.model, request.tenant)
        with self.gateway.open(generation) as opened:
            outcome.is_open = True
            check_room(self, request, before, own)
            self.opened[request.id] = opened
            async with aclosing(opened.deltas()) as deltas:
                count = 0
                async for delta in deltas:
                    self._take(outcome, delta)
                    count += 1
                    if request.leaves_after is not None and count > request.leaves_after:
                        outcome.status = "left"
                        return
                    if request.read_pause:
                        await asyncio.sleep(request.read_pause)
        outcome.status = "done"

    def _take(self, outcome: Outcome, delta: Any) -> None:
        index = delta.index
        if index in outcome.reasons:
            raise BrokenRuleError(f"{outcome.request.id}: a delta after the last one of choice {index}")
        outcome.tokens.setdefault(index, []).extend(delta.token_ids)
        outcome.text[index] = outcome.text.get(index, "") + delta.text
        if delta.prompt_logprobs is not None:
            if outcome.prompt_logprobs is not None and outcome.request.n == 1:
                raise BrokenRuleError(f"{outcome.request.id}: prompt logprobs came twice")
            outcome.prompt_logprobs = [each.token_id for each in delta.prompt_logprobs[1:]]
        if delta.token_ids:
            outcome.token_times.append(self.loop.time())
        if delta.finish_reason is not None:
            outcome.reasons[index] = delta.finish_reason
        self.note(f"{outcome.request.id} {index} {delta.token_ids}")

    def count_open(self, name: str, tenant: str | None = None) -> int:
        """Choices that are open, or have a place: counted beside the product's own counters."""
        streams = [
            sequence.stream
            for opened in self.opened.values()
            for sequence in opened.sequences
            if opened.generation.model.name == name and tenant in {None, opened.generation.tenant}
        ]
        held = sum(
            request.n
            for request in self.reserved.values()
            if request.model == name and tenant in {None, request.tenant}
        )
        return sum(not stream.finished for stream in streams) + held

    async def _play_events(self) -> None:
        for event in self.scenario.events:
            await asyncio.sleep(max(0.0, self.start + event.at - self.loop.time()))
            self.note(f"event {event.kind} {event.model} {event.value}")
            await self._play(event)

    async def _play(self, event: MachineEvent) -> None:
        machine = self.machine
        process = machine.alive(event.model)
        match event.kind:
            case "kill" if process:
                process.die(9, "kill", "killed by")
            case "oom" if process:
                machine.oom_kills += 1
                process.die(9, "oom", "out of memory")
            case "hang":
                setup = self.setups[event.model]
                setup.step_faults[setup.steps + 1] = "hang"
            case "stop" if process and process.engine is not None:  # nothing watches a load
                process.cause = process.cause or "stop"
                process.stop()
                self.loop.call_later(event.value, process.go_on)
            case "spawn":
                machine.spawn_errors = int(event.value)
            case "load_kill":
                setup = self.setups[event.model]
                setup.load_faults[setup.starts + 1] = "kill"
            case "jump":
                self.clock.jump(event.value)
            case "starve":
                machine.slowness = 200.0
                self.loop.call_later(event.value, self._feed)
            case "slow":
                setup = self.setups[event.model]
                setup.step_faults[setup.steps + 1] = "slow"
            case "cancel":
                if live := self.gateway.in_flight():
                    chosen = live[self.chance.randrange(len(live))].id
                    self.cancelled.add(chosen)
                    self.gateway.cancel(chosen)
            case "unload":
                self.unloads += 1
                try:
                    await self.engines.unload(event.model)
                except ApiError as error:
                    self.note(f"unload {error.code}")
            case "drain":
                self.is_closing = self.is_drained_early = True
                await self.engines.drain(event.value)

    def _feed(self) -> None:
        self.machine.slowness = 1.0

    def _end_faults(self) -> None:
        machine = self.machine
        machine.slowness, machine.spawn_errors = 1.0, 0
        for setup in self.setups.values():
            setup.client_steps = setup.steps
            setup.step_faults.clear()
            setup.load_faults.clear()
        for process in machine.processes.values():
            process.go_on()

    async def _ask_control(self) -> None:
        """Ask each model that is in memory once more: whatever happened to it, it answers."""
        for model in list(self.engines.models()):
            for number in range(60):
                request = RequestSetup(
                    id=f"control-{model.name}-{number}",
                    model=model.name,
                    at=0.0,
                    prompt=[1, 2, 3, 1],
                    params=SamplingParams(max_tokens=0, seed=5),
                    max_tokens=4,
                )
                outcome = self.outcomes[request.id] = Outcome(request, self.loop.time())
                await self._client(request)
                if outcome.status == "done":
                    break
                await asyncio.sleep(30.0)
            else:
                raise BrokenRuleError(f"{model.name} answers no more: {outcome.error}")

    async def _close(self) -> None:
        self.is_closing = True
        await self.engines.drain(self.scenario.drain)
        await self.residency.close()
        await self.engines.close()
        await self.gateway.close()
        await asyncio.sleep(10.0)

    # ------------------------------------------------------------------ notes

    def note(self, text: str) -> None:
        self.trace.update(f"{self.loop.time()!r} {text}\n".encode())

    def note_log(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name == "llmbox.engine":
            date = "2026-01-01 00:00:00,000"
            self.machine.current.print(f"{date} {record.levelname} {record.name}: {text}")
            if record.exc_info is not None:
                self.loop.failures.append(f"the engine logged an exception: {text}: {record.exc_info[1]!r}")
            return
        if record.exc_info is not None and record.exc_info[0] is not None:
            self.loop.failures.append(f"the daemon logged an exception: {text}: {record.exc_info[1]!r}")
        self.log.append((self.loop.time(), record.levelno, text))
        self.note(text)

    def _note_state(self, supervisor: Supervisor) -> None:
        self.note(f"{supervisor.name} is {supervisor.state}")
        if supervisor.state == "failed" and supervisor.info is not None:
            try:
                check_failed_state(self, supervisor)
            except BrokenRuleError as error:  # the supervision would take it for its own
                self.loop.failures.append(str(error))
                self.loop.stop()
            self.failed_at.append((supervisor.name, self.loop.time()))

    def _note_death(self, process: VirtualProcess, death: Death) -> None:
        self.note(f"{process.pid} {process.name} ended with {death.code}: {death.cause}")
        for model in self.engines.models():
            supervisor = model.supervisor
            if supervisor.pid == process.pid and death.said:
                self.must_be_logged.append((process.name, death, supervisor))


class _LogHandler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note_log(record)


@cache
def folder() -> Path:
    """Folder that nothing is written to; the key of output hashes is always the same."""
    found = Path(tempfile.mkdtemp(prefix="llmbox-simulate-"))
    (found / "output-hash.key").write_bytes(bytes(32))
    return found


@cache
def metrics() -> Metrics:
    return Metrics()


def simulate(seed: int, scenario: Scenario | None = None) -> SimulationReport:
    """Run one seed. Never raises for a broken rule: the report says which."""
    scenario = scenario or draw_scenario(seed)
    world = World(scenario)
    broken = ""
    with world.patched():
        try:
            world.loop.run_until_complete(world.run())
            world.finish()
        except (BrokenRuleError, StuckError, TimeoutError) as error:
            broken = f"{type(error).__name__}: {error}"
        except RuntimeError:
            if not world.loop.failures:
                raise
        world.broken = broken = "; ".join([*world.loop.failures, *filter(None, [broken])])
        _clear_up(world)
    counts: dict[str, int] = {}
    for outcome in world.outcomes.values():
        told = outcome.error.code if outcome.error is not None else outcome.status
        counts[told or ""] = counts.get(told or "", 0) + 1
    return SimulationReport(
        seed=seed,
        weather=scenario.weather,
        broken=broken,
        digest=world.trace.hexdigest(),
        virtual_s=world.loop.time() - 1000.0,
        requests=len(world.outcomes),
        deaths=sum(bool(death.cause) for death in world.machine.deaths),
        outcomes=counts,
    )


def _clear_up(world: World) -> None:
    """End processes and tasks that a broken run has left."""
    for process in world.machine.processes.values():
        if process.greenlet and process.exited is None:
            process.exited = -9
            try:
                process.greenlet.throw(ProcessKilled(9))
            except BaseException:  # noqa: BLE001 - it is thrown away
                pass
    tasks = asyncio.all_tasks(world.loop)
    for task in tasks:
        task.cancel()
    if tasks:
        world.loop.set_exception_handler(lambda *_: None)
        with suppress(StuckError):
            world.loop.run_until_complete(asyncio.wait(tasks))
    world.loop.close()
