"""Telemetry of the daemon: one poller reads everything, publishes a `tick` and keeps the history.

It polls once a second while somebody subscribes to events or a request is open. Otherwise it sleeps for
`IDLE_S`, so that an idle box stays idle. Reads that may hang run in separate threads (`TimedReader`): a
hung NVML loses its readings but never blocks the loop.
"""

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Generic, TypeVar

import msgspec

from ..config.entries import find_target
from ..config.paths import Paths
from ..engines.manager import EngineManager
from ..events import Events
from ..gateway.gateway import Gateway
from ..gateway.open_request import RequestObserver
from ..log import component
from ..store import RequestLog
from ..store.record import LiveRequest, RequestRecord
from .daemon_profile import DaemonProfiler
from .device_memory import BlockReader
from .engine_rates import EngineReader, ErrorRates, Latencies, total_rate
from .gpus import GpuReader, HostReader
from .history import Annotations, History, series_of
from .snapshot import (
    MOST_REQUESTS,
    NA,
    EngineSnapshot,
    ErrorRate,
    Gpus,
    Host,
    Number,
    Tick,
    Totals,
    find_alerts,
)

T = TypeVar("T")
_Job = tuple[Callable[[], T], "asyncio.Future[T]", asyncio.AbstractEventLoop]


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Result of a read that has not returned for `seconds`."""

    seconds: float


class TimedReader(Generic[T]):
    """Runs reads in a daemon thread, which never keeps the process alive."""

    def __init__(self, name: str, timeout: float) -> None:
        self._name = name
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[_Job[T]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: asyncio.Future[T] | None = None
        self._begun = 0.0

    async def read(self, call: Callable[[], T]) -> T | TimedOut:
        """Run `call`. Returns its result, or `TimedOut` after the time-out; while a call is stuck, returns so
        at once.

        Raises what `call` raises. The late result of a stuck call is discarded.
        """
        if self._pending is None or self._pending.done():
            self._start(call)
            assert self._pending is not None
            await asyncio.wait({self._pending}, timeout=self._timeout)
            if self._pending.done():
                return self._pending.result()
        return TimedOut(time.monotonic() - self._begun)

    def _start(self, call: Callable[[], T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        self._pending = loop.create_future()
        self._pending.add_done_callback(_retrieve)
        self._begun = time.monotonic()
        self._jobs.put((call, self._pending, loop))

    def _run(self) -> None:
        while True:
            call, future, loop = self._jobs.get()
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - handed to the waiting caller
                _deliver(loop, future, error)
            else:
                _deliver(loop, future, result)


def _deliver(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]", outcome: T | Exception) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, outcome)
    except RuntimeError:  # the loop is closed: the daemon ended while we hung
        return


def _settle(future: "asyncio.Future[T]", outcome: T | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _retrieve(future: "asyncio.Future[T]") -> None:
    if not future.cancelled():
        future.exception()


log = logging.getLogger(__name__)

BUSY_S: Final = 1.0
IDLE_S: Final = 60.0
TIMEOUT_S: Final = 2.0


class Poller:
    """Call `run` until cancelled; `last` is the newest tick."""

    def __init__(
        self,
        telemetry: "Telemetry",
        gateway: Gateway,
        host: HostReader,
        *,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.last = Tick(time=0.0)
        self._telemetry, self._gateway, self._host = telemetry, gateway, host
        self._engines, self._events, self._gpus = telemetry.engines, telemetry.events, telemetry.gpus
        self._gpu_guard: TimedReader[Gpus] = TimedReader("telemetry-gpu", timeout)
        self._host_guard: TimedReader[Host] = TimedReader("telemetry-host", timeout)
        self._engine_reader = EngineReader(
            telemetry.latencies, lambda model: find_target(telemetry.targets, model)
        )
        self._wake = asyncio.Event()
        telemetry.events.on_subscribe = self.wake

    def wake(self) -> None:
        """End the idle sleep, because somebody subscribes or a request was opened."""
        self._wake.set()

    @property
    def is_busy(self) -> bool:
        return self._events.subscribers > 0 or self._gateway.open_count > 0

    async def run(self) -> None:
        """Poll until cancelled. The first poll waits too, so that it does not slow the start."""
        loop = asyncio.get_running_loop()
        while True:
            if not self.is_busy:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._wake.wait()
            self._wake.clear()
            begun = loop.time()
            try:
                await self.poll()
            except Exception:
                log.exception("telemetry failed; it continues")
            await asyncio.sleep(max(0.0, begun + BUSY_S - loop.time()))

    async def newest(self) -> Tick:
        """Return a tick that is at most about a second old."""
        if time.time() - self.last.time > BUSY_S + 0.5:
            await self.poll()
        return self.last

    async def poll(self) -> Tick:
        """Read everything once, publish and remember it."""
        gpus, host = await asyncio.gather(self._read_gpus(), self._read_host())
        supervisors = [model.supervisor for model in self._engines.models()] + self._engines.loading()
        engines = self._engine_reader.read(supervisors, gpus)
        readiness = self._engines.readiness()
        error_rates = self._telemetry.error_rates.read()
        requests = self._gateway.in_flight() if self._events.subscribers else []
        tick = Tick(
            time=time.time(),
            ready=readiness.ready,
            cause=readiness.cause,
            gpus=gpus,
            host=host,
            engines=engines,
            totals=self._totals(engines, self._gateway.open_count, error_rates),
            error_rates=error_rates,
            requests=tuple(requests[:MOST_REQUESTS]),
        )
        self.last = msgspec.structs.replace(tick, attention=find_alerts(tick))
        self._telemetry.history.add(tick.time, series_of(tick))
        if self._events.subscribers:
            self._events.publish("tick", msgspec.structs.asdict(self.last), remember=False)
        return self.last

    async def _read_gpus(self) -> Gpus:
        pids = frozenset(
            pid
            for model in self._engines.models()
            if _on_gpu(model.supervisor.info)
            for pid in model.supervisor.pids
        )
        try:
            read = await self._gpu_guard.read(lambda: self._gpus.read(pids))
        except Exception as error:  # noqa: BLE001 - whatever a driver does, serving and telemetry go on
            return Gpus(problem=f"GPU readings failed: {error}")
        if isinstance(read, TimedOut):
            return Gpus(problem=f"the NVIDIA driver has not answered for {read.seconds:.0f} s")
        return read

    async def _read_host(self) -> Host:
        pids = {os.getpid(): "daemon"}
        for model in self._engines.models():
            for rank, pid in enumerate(model.supervisor.pids):
                pids[pid] = f"engine {model.name}" + (f", rank {rank}" if rank else "")
        try:
            read = await self._host_guard.read(lambda: self._host.read(pids))
        except Exception as error:  # noqa: BLE001 - as above
            return Host(problem=f"host readings failed: {error}")
        if isinstance(read, TimedOut):
            return Host(problem=f"a disk or /proc has not answered for {read.seconds:.0f} s")
        return read

    def _totals(
        self, engines: tuple[EngineSnapshot, ...], open_requests: int, error_rates: tuple[ErrorRate, ...]
    ) -> Totals:
        latencies = self._telemetry.latencies
        ttft, tpot = latencies.of()
        blocks = sum(engine.blocks_total for engine in engines)
        live = sum(engine.blocks_live for engine in engines)
        hits = [engine.prefix_hit for engine in engines if engine.prefix_hit is not NA]
        return Totals(
            running=sum(engine.running for engine in engines),
            waiting=sum(engine.waiting for engine in engines),
            open_requests=open_requests,
            tokens_in=_sum([engine.tokens_in for engine in engines]),
            tokens_out=_sum([engine.tokens_out for engine in engines]),
            ttft_p50=ttft.p50,
            ttft_p95=ttft.p95,
            tpot_p50=tpot.p50,
            tpot_p95=tpot.p95,
            kv_used=live / blocks if blocks else NA,
            prefix_hit=sum(hits) / len(hits) if hits else NA,
            requests=latencies.requests,
            failed=latencies.failed,
            error_rate=total_rate(error_rates),
        )


def _on_gpu(info: Any) -> bool:
    return info is not None and info.device.startswith("cuda")


def _sum(values: list[Number]) -> Number:
    known = [value for value in values if value is not NA]
    return sum(known) if known else NA


class RequestFeed(RequestObserver):
    """Observer that publishes events. Use it only from the daemon's event loop."""

    def __init__(self, events: Events, latencies: Latencies, error_rates: ErrorRates) -> None:
        self._events = events
        self._latencies = latencies
        self._error_rates = error_rates
        self.wake_poller: Callable[[], None] = lambda: None

    def on_open(self, request: LiveRequest) -> None:
        self._events.publish("request.started", asdict(request))
        self.wake_poller()

    def on_end(self, record: RequestRecord, reason: str = "") -> None:
        self._latencies.add(record)
        self._error_rates.add(record, reason)
        self._events.publish("request.finished", asdict(record))

    def on_refusal(self, record: RequestRecord, reason: str = "") -> None:
        """Publish a refusal. One by the server's fault counts as a failed request."""
        if record.is_failure:
            self._error_rates.add(record, reason)
        self._events.publish("request.refused", asdict(record))


class LogFeed(logging.Handler):
    """Publishes lines of the log as `log` events while somebody subscribes; earlier lines are in the file."""

    def __init__(self, events: Events, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._events = events
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        if not self._events.subscribers:
            return
        try:
            entry = {
                "time": round(record.created, 3),
                "level": record.levelname.lower(),
                "component": component(record.name),
                "message": record.getMessage(),
            }
            self._loop.call_soon_threadsafe(self._publish, msgspec.json.encode(entry))
        except Exception:  # noqa: BLE001 - a log record must not break its caller
            self.handleError(record)

    def _publish(self, entry: bytes) -> None:
        self._events.publish("log", msgspec.json.decode(entry), remember=False)


class Telemetry:
    """Call `start` and `close` on the event loop; nothing runs before `start`."""

    def __init__(
        self,
        engines: EngineManager,
        events: Events,
        store: RequestLog,
        gpus: GpuReader | None = None,
        *,
        targets: tuple[str, ...] = (),
    ) -> None:
        """Create the parts. `targets`: latency targets, as in `usage.targets`."""
        self.history = History(store)
        self.marks = Annotations(store)
        self.blocks = BlockReader(engines)
        self.latencies = Latencies()
        self.error_rates = ErrorRates()
        self.profiler = DaemonProfiler()
        self.feed = RequestFeed(events, self.latencies, self.error_rates)
        self.engines, self.events, self.gpus = engines, events, gpus or GpuReader()
        events.on_publish = self.marks.take
        self.targets = targets
        self._log_feed: LogFeed | None = None
        self._task: asyncio.Task[None] | None = None
        self.poller: Poller | None = None

    def start(self, gateway: Gateway, paths: Paths) -> None:
        self.poller = Poller(self, gateway, HostReader(paths.state_dir))
        self.feed.wake_poller = self.poller.wake
        self._log_feed = LogFeed(self.events, asyncio.get_running_loop())
        logging.getLogger().addHandler(self._log_feed)
        self._task = asyncio.create_task(self.poller.run(), name="telemetry")

    async def newest(self) -> Tick:
        """Return a tick that is at most about a second old."""
        return Tick(time=0.0) if self.poller is None else await self.poller.newest()

    async def close(self) -> None:
        """Hand pending data to the store. Call it before the store closes."""
        if self._log_feed is not None:
            logging.getLogger().removeHandler(self._log_feed)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.history.close()
        self.marks.close()
