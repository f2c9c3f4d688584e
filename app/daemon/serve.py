"""Serving phase of the daemon: the API first, then the models, at the end the drain. Notifies systemd."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Final

import psutil
from litestar.types import ControllerRouterHandler

from llmbox.engine.hardware.proc import map_large_blocks
from llmbox.engine.ipc.spawn import ForkServer, SpawnedProcess

from ..control.controller import DaemonController, Failure
from ..engines.loaded_model import Readiness
from ..engines.manager import EngineManager
from ..errors import ApiError, load_error
from ..http.admin import admin_router
from ..http.app import DIALECTS, create_app
from ..http.in_process import send_in_process
from ..http.server.server import serve
from ..lifecycle.instance import RunningDaemon
from ..models.load_request import ModelRequest
from ..services import Services
from ..store.conversations import ToolServerSecrets
from .compose import compose, real_parts
from .network import Announcement
from .run import DaemonOptions

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


log = logging.getLogger("llmbox.daemon")

TITLE = "llmbox: engine"


def log_orphans() -> list[int]:
    """Log engine processes of this user whose parent is not a daemon. Returns their pids."""
    import psutil  # noqa: PLC0415 - 30 ms that the start need not wait for

    found = []
    for process in psutil.process_iter(["pid", "uids", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        uids = process.info["uids"]
        if not line.startswith(TITLE) or uids is None or uids.real != os.getuid():
            continue
        try:
            parent = process.parent()
            if parent is None or parent.pid == 1:
                found.append(process.info["pid"])
        except psutil.Error:
            continue
    if found:
        pids = " ".join(map(str, found))
        log.warning("engine processes of an earlier daemon still run: %s; end them with: kill %s", pids, pids)
    return found


_COLLECTIONS = (2000, 10, 200)
"""Thresholds of the garbage collector. A full collection with thousands of open requests stops the loop for a
tenth of a second; it runs after four million new objects instead of seventy thousand.
"""


async def serve_until_stopped(
    plan: DaemonOptions,
    running: RunningDaemon,
    sockets: Sequence[socket.socket],
    tls: ssl.SSLContext | None = None,
    first: SpawnedProcess | ForkServer | None = None,
) -> None:
    """Serve, and return once everything is closed. Raises CliError when none of the models could be served.

    `first` is the engine process for the first model, started already.
    """
    settings = plan.loaded.settings
    status = StatusLine(running.url)
    parts = (plan.parts or real_parts)()
    parts = replace(parts, launch=replace(parts.launch, env={**plan.kv_cache, **parts.launch.env}))
    services = compose(settings, plan.paths, parts, first, status.update)
    control = DaemonController(services, running, plan.loaded, plan.reload, plan.begun_with, plan.checks)
    app = create_app(services, [*DIALECTS, admin_router, *_panel()])
    app.state.control = control
    _handle_signals(control)
    gc.freeze()  # imported objects stay: collections need not scan them
    gc.set_threshold(*_COLLECTIONS)
    map_large_blocks()
    control.library.downloads.restore()
    services.batches.start(partial(send_in_process, app))
    loading = asyncio.create_task(_load_first(control, plan.models))
    looking = asyncio.create_task(asyncio.to_thread(log_orphans))
    announcement = Announcement(settings.server, running)
    patience = settings.server.drain_timeout
    finishing = asyncio.create_task(services.background.finish(services.drain, patience))
    try:
        await serve(
            app.shell,
            sockets,
            limits=settings.limits,
            drain=services.drain,
            drain_timeout=patience,
            tls=tls,
            trusted_proxies=settings.server.trusted_proxies,
            on_ready=lambda: _api_is_up(plan, services, running, announcement),
        )
    finally:
        status.close()
        notify("STOPPING=1")
        await announcement.withdraw()
        loading.cancel()
        if not services.drain.draining:
            finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
        await looking
        await control.close()
        await _close(services)
    failure = loading.result() if loading.done() and not loading.cancelled() else None
    if failure is not None:
        raise load_error(failure.model, failure.cause, failure.code, str(plan.paths.log_file))


def _panel() -> list[ControllerRouterHandler]:
    """Import the panel's routes by name: layers point from the panel to the app, and only this function plugs
    it in.
    """
    routes: list[ControllerRouterHandler] = import_module("llmbox.ui.web").panel_routes
    return routes


async def _load_first(control: DaemonController, models: Sequence[ModelRequest]) -> Failure | None:
    """Load the models of the start. When none can be served the daemon ends; that failure is the result."""
    tasks = [control.begin_load(model) for model in models]
    failures = [failure for task in tasks if (failure := await task) is not None]
    if not failures or len(failures) < len(tasks):
        return None
    log.error("no model can be served: ending")
    control.services.drain.begin()
    return failures[0]


def _handle_signals(control: DaemonController) -> None:
    loop = asyncio.get_running_loop()
    drain = control.services.drain

    def stop() -> None:
        log.info("stopping now" if drain.draining else "draining: open requests may finish")
        drain.begin()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, control.reload)


async def _close(services: Services) -> None:
    await services.batches.close()
    await services.mcp_clients.close()
    await services.background.close()
    await services.engines.close()
    await services.gateway.close()
    await services.telemetry.close()
    services.events.close()
    await asyncio.to_thread(services.security.close)
    await asyncio.to_thread(services.request_log.close)


def _forget_secrets_of_gone_keys(services: Services) -> None:
    """Remove the secrets of keys that were revoked while no daemon ran."""
    if services.paths.mcp_secrets_file.exists():
        try:
            ToolServerSecrets(services.paths.mcp_secrets_file).keep_owners(services.security.keys.ids())
        except ApiError as error:
            log.warning("%s", error.message)


def _api_is_up(
    plan: DaemonOptions, services: Services, running: RunningDaemon, announcement: Announcement
) -> None:
    services.request_log.start()  # its thread imports SQLAlchemy, which must not slow down the start
    _forget_secrets_of_gone_keys(services)
    ToolServerSecrets(services.paths.mcp_secrets_file).take_from(services.request_log)
    services.telemetry.start(services.gateway, services.paths)
    announcement.start()
    notify(f"READY=1\nSTATUS=Serving on {running.url}")
    with contextlib.suppress(OSError):  # nobody reads our stdout any more: serve all the same
        plan.on_up(running, lambda: services.security.sign_in_link(running.url))
    log.info("API up %.2f s after start", time.time() - psutil.Process().create_time())
