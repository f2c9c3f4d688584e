"""Life-cycle events of requests, and the daemon's log, on the event stream."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict

import msgspec

from ..events import Events
from ..gateway.request_events import LiveRequest
from ..logging.setup import component
from ..store.record import RequestRecord
from .error_rates import ErrorRates
from .latencies import Latencies


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
