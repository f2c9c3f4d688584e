"""Reachability of a hub, known within seconds: its own client would be silent for a minute."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from . import errors

TELL_S: Final = 1.5
"""Seconds after which a waiting user is told the cause."""
GIVE_UP_S: Final = 6.0


def require_reachable(endpoint: str, note: Callable[[str], None]) -> None:
    """Resolve the endpoint's name, or its proxy's, and connect to it once. Raises HubError.

    `note` is called once if that takes longer than TELL_S. A resolver cannot be interrupted, so it runs in a
    thread.
    """
    host, port, via = _target(endpoint)
    attempt = _Attempt(host, port)
    threading.Thread(target=attempt.run, name="llmbox-reach", daemon=True).start()
    if not attempt.ended.wait(TELL_S):
        note(f"{endpoint}: {attempt.step}{via}…")
        attempt.ended.wait(GIVE_UP_S - TELL_S)
    if not attempt.ended.is_set():
        raise errors.unreachable(
            endpoint, f"{attempt.step}{via} took longer than {GIVE_UP_S:.0f} s", is_definite=True
        )
    if attempt.problem:
        raise errors.unreachable(endpoint, f"{attempt.problem}{via}", is_definite=True)


class _Attempt:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.step = f"looking up {host}"
        self.problem = ""
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            self._connect()
        except socket.gaierror as error:
            self.problem = f"the name {self._host} cannot be resolved ({error.strerror or error})"
        except ConnectionRefusedError:
            self.problem = f"nothing listens at {self._host} port {self._port}"
        except OSError as error:
            self.problem = f"{self._host} port {self._port}: {error.strerror or error}"
        except UnicodeError:
            self.problem = f"{self._host!r} is no host name"
        finally:
            self.ended.set()

    def _connect(self) -> None:
        """Try one address after another, as the hub's client would."""
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        self.step = f"connecting to {self._host} port {self._port}"
        problem: OSError | None = None
        for family, kind, protocol, _, address in found:
            with contextlib.closing(socket.socket(family, kind, protocol)) as wire:
                wire.settimeout(GIVE_UP_S)
                try:
                    wire.connect(address)
                except OSError as error:
                    problem = problem or error
                else:
                    return
        raise problem or OSError("no address")


def _target(endpoint: str) -> tuple[str, int, str]:
    """Return host and port that connections to the endpoint go to, and the name of a proxy there."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        through = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if through.hostname:
            port = through.port or (443 if through.scheme == "https" else 80)
            return through.hostname, port, f" (the proxy of {parts.scheme.upper()}_PROXY)"
    return host, parts.port or (443 if parts.scheme == "https" else 80), ""
