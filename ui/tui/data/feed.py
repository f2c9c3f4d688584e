"""Feed thread: turns the event stream into messages. Reconnects forever, once a second."""

import threading
from collections.abc import Callable

import msgspec
from textual.message import Message

from llmbox.app.errors import CliError
from llmbox.app.telemetry.snapshot import Tick

from ..messages import Connected, EventReceived, Lost, TickReceived
from .api import Api

RETRY_S = 1.0


class Feed:
    def __init__(self, api: Api, post: Callable[[Message], object], *, once: bool = False) -> None:
        """Create the feed. `once`: the end of the stream is final (a replay)."""
        self._api, self._post, self._once = api, post, once
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._api.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            reason = "the daemon ended the stream"
            try:
                self._read()
            except CliError as error:
                reason = error.why or error.what
            except (OSError, ValueError, AttributeError) as error:
                # http.client fails so when `stop` closes the connection from the other thread.
                reason = str(error) or type(error).__name__
            if self._stopped.is_set():
                return
            self._post(Lost("the recording has ended" if self._once else reason))
            if self._once:
                return
            self._stopped.wait(RETRY_S)

    def _read(self) -> None:
        connected = False
        for kind, data in self._api.events():
            if self._stopped.is_set():
                return
            if not connected:
                connected = True
                self._post(Connected())
            if kind == "tick":
                self._post(TickReceived(msgspec.convert(data, Tick)))
            else:
                self._post(EventReceived(kind, data))
