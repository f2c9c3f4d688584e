"""Notifications to systemd (sd_notify): datagrams to the socket that NOTIFY_SOCKET names."""

import asyncio
import contextlib
import os
import socket
import time
from typing import Final

from ..engines.manager import EngineManager
from ..engines.readiness import Readiness

_SETTLE_SECONDS: Final = 0.2
"""Seconds to wait for further changes, so that several at once make one line."""


def notify(state: str) -> None:
    """Send a notification. Does nothing without a service manager, or when it is too busy to receive."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(address)
        sender.send(state.encode())


def format_status(url: str, readiness: Readiness, now: float) -> str:
    """Format the line for `systemctl status`: the URL, and each model that does not answer.

    `now`: Unix seconds.
    """
    at = time.strftime("%H:%M:%S", time.localtime(now))
    problems = [
        f"{model.name} {model.state} ({at}): {model.cause}" for model in readiness.models if model.cause
    ]
    return " ".join("; ".join([f"Serving on {url}", *problems]).split())


class StatusLine:
    """Keeps systemd's status line up to date. Use it only from the daemon's event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._timer: asyncio.TimerHandle | None = None

    def update(self, engines: EngineManager) -> None:
        """Schedule an update. Call it after each change of a model's state."""
        if self._timer is None and "NOTIFY_SOCKET" in os.environ:
            self._timer = asyncio.get_running_loop().call_later(_SETTLE_SECONDS, self._send, engines)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _send(self, engines: EngineManager) -> None:
        self._timer = None
        notify(f"STATUS={format_status(self._url, engines.readiness(), time.time())}")
