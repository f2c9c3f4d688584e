"""Listening sockets of the daemon, with clear errors where it may not listen."""

import contextlib
import errno
import ipaddress
import os
import socket

from ..config.paths import Paths, socket_address
from ..config.settings import ServerSettings
from ..errors import CliError, Exit
from ..http.server.sockets import PortInUse, listen_tcp, listen_unix
from ..security.key_store import KeyStore


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
    return CliError(
        f"cannot listen on {server.host}:{server.port}",
        error.strerror or str(error),
        "llmbox doctor",
        Exit.FAILED,
    )


def holder_of(port: int) -> str | None:
    """Describe the process that listens on a port, as far as this user may see it."""
    import psutil  # noqa: PLC0415 - only needed for the message

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()}) listens there"
    return None
