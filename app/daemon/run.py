"""Run the daemon: folders, lock, sockets, log, then `serve_until_stopped`.

The sockets listen before the large imports: an early client waits for milliseconds instead of being refused.
Where the daemon may not listen, the error says why.
"""

import contextlib
import errno
import gc
import ipaddress
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
from llmbox.engine.weights.packed_cache.cache import cache_variables
from llmbox.kernels.cpu.isa import KERNEL_CACHE

from .. import log as logs
from ..config.loader import LoadedSettings
from ..config.model_settings import CacheSettings
from ..config.paths import Paths, socket_address
from ..config.settings import ServerSettings
from ..control.kv_cache import claim_kv_cache
from ..errors import CliError, Exit
from ..http.server.sockets import PortInUse, listen_tcp, listen_unix
from ..lifecycle.instance import InstanceLock, RunningDaemon
from ..models.load_request import ModelRequest
from ..security.key_store import KeyStore
from .network import open_tls


def open_sockets(server: ServerSettings, paths: Paths) -> tuple[list[socket.socket], socket.socket]:
    """Open (TCP sockets, unix socket). The caller holds the instance lock."""
    check_bind(server.host, KeyStore(paths.keys_file))
    try:
        tcp = listen_tcp(server.host, server.port)
    except PortInUse as error:
        raise CliError(
            f"{error.where} is in use",
            holder_of(server.port) or "another process listens there",
            "stop that process, or choose another port: --port N (0 takes a free one)",
            Exit.CONFLICT,
        ) from None
    except OSError as error:
        raise _cannot_listen(server, error) from error
    folder = os.open(paths.runtime_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        return tcp, listen_unix(paths.socket_file, socket_address(paths.socket_file, folder))
    finally:
        os.close(folder)


def check_bind(host: str, keys: KeyStore) -> None:
    """Refuse an address beyond this machine while there are no keys, as nobody could be admitted. Raises
    CliError.
    """
    keys.check()
    if host == "localhost":
        return
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise CliError(
            f"server.host {host!r} is not an IP address",
            "a bind address is an IP address or localhost",
            "llmbox config set server.host 127.0.0.1",
            Exit.USAGE,
        ) from None
    if not address.is_loopback and not keys.usable():
        raise CliError(
            f"refusing to listen on {host}",
            "it can be reached from other machines, and there is no API key yet",
            "llmbox key add NAME, then again; or keep 127.0.0.1 and use ssh -L 7411:127.0.0.1:7411 BOX",
            Exit.DENIED,
        )


def _cannot_listen(server: ServerSettings, error: OSError) -> CliError:
    if error.errno == errno.EACCES:
        return CliError(
            f"may not listen on port {server.port}",
            "ports below 1024 belong to root",
            "llmbox up --port 7411",
            Exit.DENIED,
        )
    why, fix = error.strerror or str(error), "llmbox doctor"
    if error.errno == errno.EADDRNOTAVAIL:
        why = "no network interface of this machine has this address"
        fix = "ip address lists them; --host 127.0.0.1 always works"
    return CliError(f"cannot listen on {server.host}:{server.port}", why, fix, Exit.FAILED)


def holder_of(port: int) -> str | None:
    """Describe the process that listens on a port, as far as this user may see it."""
    import psutil  # noqa: PLC0415 - only needed for the message

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()}) listens there"
    return None


if TYPE_CHECKING:
    from .compose import DaemonParts

log = logging.getLogger("llmbox.daemon")


def with_caches(launch: Launch, paths: Paths, settings: CacheSettings) -> Launch:
    """Set the kernel and packed-weight caches of a launch. They are under --data-dir, if there is one."""
    kernels = {} if KERNEL_CACHE in os.environ else {KERNEL_CACHE: str(paths.kernel_cache)}
    repacked = cache_variables(paths.repacked, settings.repacked_gb)
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
