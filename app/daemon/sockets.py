"""The daemon's listening sockets: 127.0.0.1, ::1 and the unix socket."""

import contextlib
import errno
import ipaddress
import os
import socket

from ..errors import CliError, Exit
from ..paths import Paths, socket_address
from ..settings import ServerSettings

BACKLOG = 2048


def require_loopback(host: str) -> None:
    """Keys do not exist yet, so nobody beyond this machine may be let in."""
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
    if not address.is_loopback:
        raise CliError(
            f"refusing to listen on {host}",
            "it can be reached from other machines, and access keys are not available in this version",
            "keep server.host at 127.0.0.1 and reach it through a tunnel: ssh -L 7411:127.0.0.1:7411 BOX",
            Exit.DENIED,
        )


def bind_tcp(server: ServerSettings) -> list[socket.socket]:
    """Listening sockets, IPv4 before IPv6. Port 0 takes one free port for both families."""
    require_loopback(server.host)
    hosts = ["127.0.0.1", "::1"] if server.host in {"localhost", "127.0.0.1"} else [server.host]
    first = _listen(hosts[0], server.port)
    sockets = [first]
    port = first.getsockname()[1]
    for host in hosts[1:]:
        try:
            sockets.append(_listen(host, port))
        except CliError:
            first.close()
            if server.port == 0:  # somebody has the same number on the other family: draw again
                return bind_tcp(server)
            raise
        except OSError:
            pass  # a machine without IPv6
    return sockets


def bind_unix(paths: Paths) -> socket.socket:
    """0600 by the umask and inside a 0700 folder: only this user connects. The instance lock must be held."""
    folder = os.open(paths.runtime_dir, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(socket_address(paths.socket_file, folder))
        paths.socket_file.chmod(0o600)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    listener.setblocking(False)
    return listener


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise _port_taken(host, port) from None
        if error.errno == errno.EACCES:
            raise CliError(
                f"may not listen on port {port}",
                "ports below 1024 belong to root",
                "--port 7411",
                Exit.DENIED,
            ) from None
        raise
    listener.setblocking(False)
    return listener


def _port_taken(host: str, port: int) -> CliError:
    return CliError(
        f"port {port} on {host} is in use",
        holder_of(port) or "another process listens there",
        "stop that process, or choose another port: --port N (0 takes a free one)",
        Exit.CONFLICT,
    )


def holder_of(port: int) -> str | None:
    """Which process listens on a port, as far as this user may see."""
    import psutil  # type: ignore[import-untyped]  # noqa: PLC0415 - only needed for the message

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"pid {connection.pid} ({psutil.Process(connection.pid).name()}) listens there"
    return None
