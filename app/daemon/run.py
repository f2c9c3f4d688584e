"""The daemon from its first line to its last: folders, lock, sockets, log; then `serving`.

The sockets listen before the large imports: a client that comes early waits for milliseconds instead of being
refused.
"""

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from setproctitle import setproctitle

from llmbox import __version__
from llmbox.engine.spawn import Launch, Spawned, spawn

from .. import logs
from ..control.model_request import ModelRequest
from ..control.running import Running
from ..paths import Paths
from ..settings_load import LoadedSettings
from .instance import InstanceLock
from .launching import with_caches
from .listen import open_sockets

if TYPE_CHECKING:
    from .parts import Parts

log = logging.getLogger("llmbox.daemon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a daemon is told at its start."""

    paths: Paths
    loaded: LoadedSettings
    models: Sequence[ModelRequest]
    begun_with: dict[str, Any]
    """Flags and model names of the command line, for `restart`."""
    reload: Callable[[], LoadedSettings]
    """Reads the settings again; raises CliError."""
    on_up: Callable[[Running, Callable[[], str]], None]
    """Called once the API answers; the second argument makes a one-time sign-in link for the panel."""
    checks: Callable[[], list[dict[str, str]]] = list
    """Runs those of `llmbox doctor`."""
    parts: "Callable[[], Parts] | None" = None
    """Replaces what the daemon is composed of (tests)."""
    background: bool = False


def run_daemon(plan: Plan) -> None:
    """Serves until told to stop. Raises CliError when it cannot begin or no model can be served."""
    plan.paths.create()
    settings = plan.loaded.settings
    with InstanceLock(plan.paths) as lock:
        tcp, unix = open_sockets(settings.server, plan.paths)
        running = _describe(tcp[0], plan.paths)
        logs.set_up(plan.paths.log_file, settings.log, background=plan.background)
        lock.announce(running)
        setproctitle("llmbox: daemon")
        if lock.leftover is not None:
            log.warning("an earlier daemon (pid %d) ended without cleaning up", lock.leftover.pid)
        log.info("llmbox %s, pid %d, listens on %s", __version__, running.pid, running.url)
        first = _first_engine(plan)  # imports torch while we import what serves
        try:
            _serve(plan, running, [*tcp, unix], first)
        finally:
            log.info("stopped")


def _serve(plan: Plan, running: Running, sockets: Sequence[socket.socket], first: Spawned | None) -> None:
    gc.disable()  # what is imported stays
    try:
        import asyncio  # noqa: PLC0415

        from .serving import serve_until_stopped  # noqa: PLC0415 - half a second of imports
    finally:
        gc.freeze()
        gc.enable()
    asyncio.run(serve_until_stopped(plan, running, sockets, first))


def _first_engine(plan: Plan) -> Spawned | None:
    if plan.parts is not None or not plan.models:
        return None
    try:
        return spawn(with_caches(Launch(), plan.paths, plan.loaded.settings.cache))
    except OSError:
        return None  # the load will try again and say why not


def _describe(tcp: socket.socket, paths: Paths) -> Running:
    host, port = tcp.getsockname()[:2]
    return Running(
        pid=os.getpid(),
        host=host,
        port=port,
        socket=str(paths.socket_file),
        started_at=time.time(),
        version=__version__,
    )
