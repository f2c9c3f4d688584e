"""Telemetry of the daemon: its parts, with one start and one close."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict

import msgspec

from ..config.entries import find_target
from ..config.paths import Paths
from ..engines.manager import EngineManager
from ..events import Events
from ..gateway.gateway import Gateway
from ..gateway.request_events import LiveRequest
from ..logging.setup import component
from ..store import RequestLog
from ..store.record import RequestRecord
from .daemon_profile import DaemonProfiler
from .device_memory import BlockReader
from .engine_rates import ErrorRates, Latencies
from .gpus import GpuReader, HostReader
from .history import Annotations, History
from .poller import Poller
from .snapshot import Tick


class RequestFeed:
    """Gateway observer that publishes events. Use it only from the daemon's event loop."""

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
        self._engines, self._events = engines, events
        events.on_publish = self.marks.take
        self.targets = targets
        self._gpus = gpus or GpuReader()
        self._log_feed: LogFeed | None = None
        self._task: asyncio.Task[None] | None = None
        self.poller: Poller | None = None

    def start(self, gateway: Gateway, paths: Paths) -> None:
        self.poller = Poller(
            self._engines,
            gateway,
            self._events,
            self.history,
            self.latencies,
            self.error_rates,
            gpus=self._gpus,
            host=HostReader(paths.state_dir),
            find_target=lambda model: find_target(self.targets, model),
        )
        self.feed.wake_poller = self.poller.wake
        self._log_feed = LogFeed(self._events, asyncio.get_running_loop())
        logging.getLogger().addHandler(self._log_feed)
        self._task = asyncio.create_task(self.poller.run(), name="telemetry")

    async def newest(self) -> Tick:
        """Return a tick of this moment, give or take a second."""
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
