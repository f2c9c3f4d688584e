"""Run the daemon: folders, lock, sockets, log, then `serve_until_stopped`.

The sockets listen before the large imports: an early client waits for milliseconds instead of being refused.
"""

import gc
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from setproctitle import setproctitle

from llmbox import __version__
from llmbox.engine.hardware.proc import can_fork
from llmbox.engine.ipc.spawn import ForkServer, Launch, SpawnedProcess, spawn
from llmbox.engine.weights.packed_cache import environment
from llmbox.kernels.cpu.isa import KERNEL_CACHE

from ..config.loader import LoadedSettings
from ..config.model_settings import CacheSettings
from ..config.paths import Paths
from ..control.kv_cache import claim_kv_cache
from ..lifecycle.instance import InstanceLock, RunningDaemon
from ..logging import setup as logs
from ..models.load_request import ModelRequest
from .listen import open_sockets
from .tls import open_tls

if TYPE_CHECKING:
    from .compose import DaemonParts

log = logging.getLogger("llmbox.daemon")


def with_caches(launch: Launch, paths: Paths, settings: CacheSettings) -> Launch:
    """Set the kernel and packed-weight caches of a launch. They are under --data-dir, if there is one."""
    kernels = {} if KERNEL_CACHE in os.environ else {KERNEL_CACHE: str(paths.kernel_cache)}
    repacked = environment.variables(paths.repacked, settings.repacked_gb)
    return replace(launch, env={**kernels, **repacked, **launch.env})


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """Options of a daemon's start."""

    paths: Paths
    loaded: LoadedSettings
    models: Sequence[ModelRequest]
    begun_with: dict[str, Any]
    """Flags and model names of the command line, for `restart`."""
    reload: Callable[[], LoadedSettings]
    """Reads the settings again; raises CliError."""
    on_up: Callable[[RunningDaemon, Callable[[], str]], None]
    """Called once the API answers. The second argument makes a one-time sign-in link for the panel."""
    checks: Callable[[], list[dict[str, str]]] = list
    """Runs the checks of `llmbox doctor`."""
    parts: "Callable[[], DaemonParts] | None" = None
    """Replaces the composition of the daemon (tests)."""
    background: bool = False
    kv_cache: Mapping[str, str] = field(default_factory=dict)
    """Environment that gives engines the KV cache on disk (`app/control/kv_cache.py`)."""


def run_daemon(plan: DaemonOptions) -> None:
    """Run the daemon until it is stopped. Raises CliError when it cannot start or no model can be served."""
    plan.paths.create()
    settings = plan.loaded.settings
    with InstanceLock(plan.paths) as lock:
        tcp, unix = open_sockets(settings.server, plan.paths)
        tls = open_tls(settings.server, plan.paths)
        running = _describe(tcp[0], plan.paths, certificate="" if tls is None else tls.certificate)
        logs.set_up(plan.paths.log_file, settings.log, background=plan.background)
        lock.announce(running)
        setproctitle("llmbox: daemon")
        if lock.leftover is not None:
            log.warning("an earlier daemon (pid %d) ended without cleaning up", lock.leftover.pid)
        log.info("llmbox %s, pid %d, listens on %s", __version__, running.pid, running.url)
        with claim_kv_cache(plan.paths, settings.cache) as kv_cache:
            plan = replace(plan, kv_cache=kv_cache)
            first = _first_engine(plan)  # imports torch while this process imports the server
            try:
                _serve(plan, running, [*tcp, unix], None if tls is None else tls.context, first)
            finally:
                log.info("stopped")


def _serve(
    plan: DaemonOptions,
    running: RunningDaemon,
    sockets: Sequence[socket.socket],
    tls: ssl.SSLContext | None,
    first: SpawnedProcess | ForkServer | None,
) -> None:
    gc.disable()  # imported objects live until the end
    try:
        import asyncio  # noqa: PLC0415

        from .serve import serve_until_stopped  # noqa: PLC0415 - half a second of imports
    finally:
        gc.freeze()
        gc.enable()
    asyncio.run(serve_until_stopped(plan, running, sockets, tls, first))


def _first_engine(plan: DaemonOptions) -> SpawnedProcess | ForkServer | None:
    if plan.parts is not None or not plan.models:
        return None
    settings = plan.loaded.settings
    launch = with_caches(Launch(env=plan.kv_cache), plan.paths, settings.cache)
    try:
        return ForkServer(launch) if settings.memory.spare_engine and can_fork() else spawn(launch)
    except OSError:
        return None  # the load tries again and reports the reason


def _describe(tcp: socket.socket, paths: Paths, certificate: str) -> RunningDaemon:
    host, port = tcp.getsockname()[:2]
    return RunningDaemon(
        pid=os.getpid(),
        host=host,
        port=port,
        socket=str(paths.socket_file),
        started_at=time.time(),
        version=__version__,
        certificate=certificate,
    )
