"""World of one simulated run: the daemon's parts as they are, clients, and faults at their times."""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

from llmbox.app.config.settings import Settings
from llmbox.app.control.model_scheduler import ModelScheduler, SchedulerDeps
from llmbox.app.control.residency import MemoryNeed
from llmbox.app.engines import engine_process, restart_policy
from llmbox.app.engines.engine_process import SupervisorOptions
from llmbox.app.engines.eviction import MemoryRequest
from llmbox.app.engines.manager import EngineManager
from llmbox.app.engines.request_journal import RequestJournal
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError
from llmbox.app.events import Events
from llmbox.app.gateway.gateway import Gateway
from llmbox.app.gateway.open_request import RequestObserver
from llmbox.app.http.ollama import responder
from llmbox.app.http.openai import sampling
from llmbox.app.http.server import errors as server_errors
from llmbox.app.http.server.errors import encode_error
from llmbox.app.lifecycle.drain import BackgroundTasks, Drain
from llmbox.app.metrics import Metrics
from llmbox.app.models.catalog import ModelRef
from llmbox.app.models.registry import Registry
from llmbox.app.security.security import Security
from llmbox.app.store import RequestLog, database
from llmbox.app.store import writer as request_writer
from llmbox.app.store.queries import requests as queries
from llmbox.app.store.queries import stored_answers as stored_queries
from llmbox.app.store.record import RequestRecord
from llmbox.app.store.stored_answers import StoredAnswers
from llmbox.app.text.chat_template import Chat, RenderedChat
from llmbox.app.text.output.output_formats import OutputFormat
from llmbox.app.text.tokenizer.text_encoder import SpecialTokenMarkers
from llmbox.app.util import threads
from llmbox.app.util.threads import off_loop
from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware import machine as hardware
from llmbox.engine.ipc import channel, client
from llmbox.engine.ipc import spawn as spawn_module
from llmbox.engine.ipc.messages import AbortRequest
from llmbox.engine.kv_store import block_file, store, store_threads
from llmbox.engine.kv_store import folder as kv_folder
from llmbox.engine.process import engine_main

from .clients import Clients
from .disks import Disk, create_engine, empty_log, failing_inserts, folder, read_rows, upgrade
from .engine import MODEL_BYTES, run_engine
from .http_clients import begin_http
from .machine import Death, Machine, VirtualProcess
from .next_daemon import DaemonLegacy, check_next_daemon, copy_legacy
from .rules import (
    check_after,
    check_failed_state,
    check_kills,
    check_log,
    check_outcomes,
    check_records,
    check_rest,
)
from .scenario import MachineEvent, Scenario
from .step_rules import BrokenRuleError
from .threads import queue_of, threading_of
from .virtual_loop import VirtualClock, VirtualLoop

HARDWARE = hardware.Machine(
    hardware.Cpu("test", 1, 1, ()), hardware.Memory(0, 0, limited_by_cgroup=False), (), None
)
PATIENCE = 40_000.0
"""Virtual seconds within which everything must have ended."""


class StubText:
    """Text side of a model: each token is one letter."""

    warnings = ()
    encoder = None
    tokens = None
    vision = None
    chat_template = None
    output_format = OutputFormat(name="plain")
    eos_token_ids = ()
    generation_defaults: ClassVar[dict[str, float]] = {}

    def beside_embedding(self, _: int) -> "StubText":
        return self

    def detokenizer(self, **_: Any) -> Any:
        return SimpleNamespace(push=lambda token: chr(48 + token), finish=str)

    async def off_loop(self, size: int, work: Callable[[], Any]) -> Any:
        return await off_loop(size, work)

    async def render_chat(self, _: Any, chat: Chat) -> RenderedChat:
        text = "".join(message["content"] for message in chat.messages)
        return RenderedChat(text, SpecialTokenMarkers.absent_from(text), lambda said, _: self.encode(said))

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - 48 for letter in text]

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
        self.machine.folder = folder()
        self.machine.mean_latency = scenario.latency
        self.machine.capacity = scenario.capacity
        self.machine.memory, self.machine.available = scenario.memory, scenario.available
        self.machine.has_poison = any(request.is_poison for request in scenario.requests)
        self.machine.on_death = self._note_death
        self.disk = Disk(self.machine, scenario.write_faults, scenario.read_faults)
        self.log: list[tuple[float, int, str]] = []
        self.trace = sha256()
        self.clients = Clients(self)
        self.told_errors: dict[str, ApiError] = {}
        """Errors of answers over HTTP by their texts."""
        self.cancelled: set[str] = set()
        self.ends: dict[str, tuple[int, str, str]] = {}
        """Status, code and reason of each request that had an end, by the id of its row."""
        self.drain, self.background = Drain(), BackgroundTasks()
        self.legacies: list[DaemonLegacy] = []
        self.unloaded: set[str] = set()
        """Models that an operator wanted to unload."""
        self.must_be_logged: list[tuple[str, Death, Supervisor]] = []
        self.failed_at: list[tuple[str, float]] = []
        self.is_closing = False
        self.is_drained_early = False
        self.blameless = {name for name in self.setups if scenario.blames_nobody(name)}
        self.broken = ""
        self.fault_kinds = {
            name: scenario.step_faults(name) | scenario.event_kinds(name) for name in self.setups
        }

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
            SupervisorOptions(
                queue_limit=scenario.queue_limit,
                queue_per_key=scenario.queue_per_key,
                clock=self.loop.time,
                on_change=self._note_state,
            ),
            keep_spare=scenario.keep_spare,
        )
        deps = SchedulerDeps(
            settings=lambda: settings,
            find=lambda name: ModelRef(name, folder() / name, "hub") if name in self.setups else None,
            registry=Registry(folder() / "models.json"),
            clock=self.loop.time,
            machine=lambda: HARDWARE,
            device=lambda *_: "cpu",
            budgets=lambda *_: (scenario.memory,),
            sizes=lambda *_: MemoryNeed(
                "cpu",
                (MemoryRequest((0,), MODEL_BYTES, MODEL_BYTES),),
                (scenario.memory,),
                available=scenario.available,
            ),
        )
        self.events = Events()
        self.residency = ModelScheduler(self.engines, self.events, deps)
        self.request_log = RequestLog(self._open_log())
        if scenario.writes_log:
            self.request_log.start()
        self.stored = StoredAnswers(self.request_log)
        self.gateway = Gateway(self.engines, self.request_log, metrics(), settings, _EndObserver(self))
        if any(request.dialect for request in scenario.requests):
            begin_http(self, settings)

    def _open_log(self) -> Path:
        """Return the path of the request log, which has the newest schema already."""
        path = self.machine.folder / "requests.db"
        if self.scenario.writes_log:
            shutil.copyfile(empty_log(), path)
        return path

    def read_log(self) -> dict[str, list[Any]]:
        """Rows of the request log by the id of the request."""
        rows: dict[str, list[Any]] = {}
        if self.scenario.writes_log:
            for path in self.machine.folder.glob("requests.db*"):
                if path.suffix not in {".db-wal", ".db-shm"} and not path.name.endswith(("-wal", "-shm")):
                    for row in read_rows(path):
                        rows.setdefault(row.id, []).append(row)
            return rows
        queue = self.request_log._queue
        while not queue.empty():
            item = queue.get_nowait()
            if isinstance(item, tuple):
                rows.setdefault(item[0].id, []).append(item[0])
        return rows

    def config(self, name: str) -> EngineConfig:
        return EngineConfig(model_path=str(folder() / name), name=name, device="cpu")

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Put the virtual machine under the product's code."""
        machine, clock, scenario = self.machine, self.clock, self.scenario
        threading, disk = threading_of(machine), self.disk
        empty_log()  # which is made by the product's own code
        handler = _LogHandler(self)
        logger = logging.getLogger("llmbox")
        nothing = SimpleNamespace(freeze=lambda: None, enable=lambda: None)
        propagates, level = logger.propagate, logger.level
        with ExitStack() as stack:
            if scenario.writes_log or any(setup.has_tiers for setup in scenario.models):
                machine.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder())))
                shutil.copyfile(folder() / "output-hash.key", machine.folder / "output-hash.key")
            # `patch.object` would take most of a short run's time.
            for owner, name, value in (
                (time, "monotonic", clock.monotonic),
                (time, "perf_counter", clock.monotonic),
                (time, "time", clock.time),
                (time, "time_ns", lambda: int(clock.time() * 1e9)),
                (time, "thread_time", clock.monotonic),
                (threads, "threading", threading),
                (store, "threading", threading),
                (store_threads, "threading", threading),
                (kv_folder, "filesystem_of", lambda _: "tmpfs"),
                (block_file, "os", disk.os),
                (request_writer, "threading", threading),
                (request_writer, "queue", queue_of(machine)),
                (queries, "add", failing_inserts(machine, scenario.log_faults, queries.add)),
                (stored_queries, "put", failing_inserts(machine, scenario.stored_faults, stored_queries.put)),
                (database, "create_engine", create_engine),
                (database, "upgrade", upgrade),
                (Security, "owner_id", lambda _, caller: caller.tenant),
                (client, "os", machine.os),
                (spawn_module, "os", machine.os),
                (spawn_module, "socket", machine.socket),
                (spawn_module, "spawn", machine.spawn),
                (engine_process, "os", machine.os),
                (engine_process, "spawn", machine.spawn),
                (engine_process, "can_fork", lambda: self.scenario.forks),
                (engine_process, "oom_kills", lambda: machine.oom_kills),
                (restart_policy, "read_state", machine.read_state),
                (restart_policy, "thread_states", machine.thread_states),
                (restart_policy, "family_of", lambda pid: [pid]),
                (restart_policy, "bytes_from_disk", lambda _: 0),
                (restart_policy, "waits_for_file_lock", lambda _: False),
                (channel, "select", machine.select),
                (server_errors, "encode_error", self._note_error),
                (responder, "encode_error", self._note_error),
                (sampling, "draw_seed", lambda: self.chance.randrange(1000)),
                (engine_main, "gc", nothing),
                (engine_main, "setproctitle", lambda _: None),
            ):
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, value)
            logger.addHandler(handler)
            logger.propagate = False
            if logger.level != logging.INFO:
                logger.setLevel(logging.INFO)
                stack.callback(logger.setLevel, level)
            try:
                yield
            finally:
                logger.removeHandler(handler)
                logger.propagate = propagates

    def _program(self, process: VirtualProcess) -> int:
        if process.is_server:
            process.suspend(None, alone=True)  # until it is killed
        return run_engine(process, self.machine, self.setups)

    # ------------------------------------------------------------------ the run

    async def run(self) -> None:
        self.build()
        scenario = self.scenario
        if scenario.weather != "models":
            for name in self.setups:
                model = await self.engines.load(self.config(name))
                await self.residency.keep(model, ttl=scenario.ttl)
        self.note("ready")
        self.start = self.loop.time()
        clients = [asyncio.create_task(self.clients.ask(request)) for request in scenario.requests]
        events = asyncio.create_task(self._play_events())
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*clients)
        events.cancel()
        await asyncio.wait({events})
        self._end_faults()
        if not self.is_closing:
            while self.engines.loading() or self.background._running:  # noqa: ASYNC110 - time is virtual
                await asyncio.sleep(1.0)
            await self.clients.ask_control()
            await asyncio.sleep(5.0)
            check_rest(self)
            if scenario.ttl is not None:
                await asyncio.sleep(scenario.ttl + 10.0)
                if left := [m.name for m in self.engines.models() if m.supervisor.state == "ready"]:
                    raise BrokenRuleError(f"idle models stay in memory: {left}")
        await self._close()
        check_after(self)
        if self.clients.stored:
            self.legacies.append(copy_legacy(self, was_killed=False))
        for legacy in self.legacies:
            await check_next_daemon(self, legacy)

    def finish(self) -> None:
        """Judge what clients got, once everything has ended."""
        check_outcomes(self)
        check_records(self)
        check_kills(self)
        check_log(self)

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
            case "fork":
                machine.fork_errors = int(event.value)
            case "server":
                for server in machine.fork_servers:
                    server.die(9, "", "")
            case "stop" if process:
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
                self.unloaded.add(event.model)
                try:
                    await self.engines.unload(event.model)
                except ApiError as error:
                    self.note(f"unload {error.code}")
            case "daemon" if self.clients.stored:
                self.legacies.append(copy_legacy(self, was_killed=True))
            case "drain":
                self.is_closing = self.is_drained_early = True
                await self._drain(event.value)

    def _feed(self) -> None:
        self.machine.slowness = 1.0

    def _end_faults(self) -> None:
        machine = self.machine
        machine.slowness, machine.spawn_errors, machine.fork_errors = 1.0, 0, 0
        self.disk.end_faults()
        for setup in self.setups.values():
            setup.client_steps = setup.steps
            setup.step_faults.clear()
            setup.load_faults.clear()
        for process in machine.processes.values():
            process.go_on()

    async def _drain(self, patience: float) -> None:
        if not self.drain.draining:
            self.drain.begin()
        await asyncio.gather(self.background.finish(self.drain, patience), self._end_requests(patience))

    async def _end_requests(self, patience: float) -> None:
        """Refuse new requests, wait for the open ones and end the rest, as the server does."""
        self.engines._closed = True
        journals = [model.supervisor._requests for model in self.engines.models()]
        if journals:
            waits = [asyncio.create_task(_emptied(journal)) for journal in journals]
            _, pending = await asyncio.wait(waits, timeout=patience)
            for wait in pending:
                wait.cancel()
        for journal in journals:
            for request_id in journal._in_engine:
                journal._send(AbortRequest(request_id=request_id))
            journal.fail_all("server_shutdown", "The server is shutting down.")

    async def _close(self) -> None:
        self.is_closing = True
        await self._drain(self.scenario.drain)
        await self.residency.close()
        await self.background.close()
        await self.engines.close()
        await self.gateway.close()
        self.request_log.close()
        await asyncio.sleep(10.0)

    # ------------------------------------------------------------------ notes

    def note(self, text: str) -> None:
        self.trace.update(f"{self.loop.time()!r} {text}\n".encode())

    def note_log(self, record: logging.LogRecord) -> None:
        text = record.getMessage().replace(str(self.machine.folder), "")  # its name differs in each run
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

    def _note_error(self, error: ApiError, path: str = "") -> bytes:
        self.told_errors[error.message] = error
        return encode_error(error, path)

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
            death.is_of_model |= supervisor.pid == process.pid
            if supervisor.pid == process.pid and death.said:
                self.must_be_logged.append((process.name, death, supervisor))


class _EndObserver(RequestObserver):
    """Notes how requests end."""

    def __init__(self, world: World) -> None:
        self._ends = world.ends

    def on_end(self, record: RequestRecord, reason: str = "") -> None:
        self._ends[record.id] = (record.http_status, record.error_code, reason)


class _LogHandler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note_log(record)


async def _emptied(journal: RequestJournal) -> None:
    """Return once no request is open."""
    if journal:
        emptied, before = asyncio.Event(), journal._on_empty
        journal._on_empty = lambda: (emptied.set(), before())
        await emptied.wait()


@cache
def metrics() -> Metrics:
    return Metrics()
