"""HTTP client for a model's bytes (GET with a range, over the standard library), and a hub's reachability.

The hub's own client cannot be capped, paused between two reads or told to check what it got, and which HTTP
library it brings changes between its versions. The token goes to the configured origin and nowhere else: a
redirect to another scheme, host or port (how large files are served) travels without it.
"""

import contextlib
import http.client
import socket
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import IO, Any, Final
from urllib.parse import urlsplit

from . import errors


class ConnectionSet:
    """Open sockets of one client. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_cut = False

    def add(self, wire: socket.socket) -> None:
        with self._lock:
            self._open.add(wire)
            if self._is_cut:
                _shut(wire)

    def cut(self) -> None:
        """Abort reads: those under way and later ones end at once, as if the other side had closed."""
        with self._lock:
            self._is_cut = True
            for wire in self._open:
                _shut(wire)


def _shut(wire: socket.socket) -> None:
    """Shut the plain socket down, also under TLS, whose state belongs to the reading thread."""
    with contextlib.suppress(OSError):  # the connection has ended by itself
        socket.socket.shutdown(wire, socket.SHUT_RDWR)


class ConnectionHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Handler of http and https whose connections belong to a set."""

    def __init__(self, wires: ConnectionSet) -> None:
        super().__init__()
        self._wires = wires

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connect, http.client.HTTPConnection), req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connect, http.client.HTTPSConnection), req)

    def _connect(self, kind: type[http.client.HTTPConnection], *arguments: Any, **options: Any) -> Any:
        wired = kind(*arguments, **options)
        connect = wired.connect

        def connect_and_add() -> None:
            connect()
            self._wires.add(wired.sock)

        wired.connect = connect_and_add  # type: ignore[method-assign]
        return wired


USER_AGENT = "llmbox"
TIMEOUT = 30.0
"""Seconds without a byte until a connection counts as dead."""


@dataclass(frozen=True, slots=True)
class HubResponse:
    """Answer of the hub. `start` is the offset of the first byte of `body`, `total` the size of the whole
    file if the hub sends it.
    """

    body: http.client.HTTPResponse
    start: int
    total: int | None
    etag: str | None
    """Etag that the hub itself sent, before any redirect."""


class HubHttpClient:
    """HTTP client. Threads may share it."""

    def __init__(self, endpoint: str, token: str | None, timeout: float = TIMEOUT) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.token = token
        self._timeout = timeout
        self._wires = ConnectionSet()

    def cut(self) -> None:
        """Abort every read under way or yet to come: they raise HubError at once. From any thread."""
        self._wires.cut()

    @contextlib.contextmanager
    def get(self, url: str, what: str, *, start: int = 0, end: int | None = None) -> Iterator[HubResponse]:
        """Request bytes from `start` up to, not including, `end`. Raises HubError."""
        redirects = _Redirects(self.endpoint, self.token)
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - http and https, see _Redirects
        _check_scheme(url)
        if self.token and origin(url) == origin(self.endpoint):
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        if start or end is not None:
            request.add_header("Range", f"bytes={start}-{'' if end is None else end - 1}")
        opener = urllib.request.build_opener(redirects, ConnectionHandler(self._wires))
        try:
            with _open(opener, request, self._timeout) as response:
                yield _answer(response, redirects.etag)
        except urllib.error.HTTPError as error:
            with error:
                raise errors.of_status(error.code, error.headers, what, self.token) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise errors.unreachable(self.endpoint, reason) from error

    def read(self, url: str, what: str, limit: int, *, start: int = 0, end: int | None = None) -> bytes:
        """Read a small file or a piece of one. More than `limit` bytes are an error."""
        with self.get(url, what, start=start, end=end) as answer:
            last = end if end is None or answer.total is None else min(end, answer.total)
            wanted = limit + 1 if last is None else last - start
            skip = start - answer.start
            if skip < 0 or wanted <= 0:
                raise errors.HubError("hub_error", f"{what} is not as expected", "another range arrived")
            data = answer.body.read(skip + wanted)[skip:]
        if end is not None and len(data) < wanted:
            raise errors.HubError("hub_error", f"{what} is not as expected", f"{len(data)} of {wanted} bytes")
        if end is None and len(data) > limit:
            raise errors.HubError("hub_error", f"{what} is not as expected", f"more than {limit} bytes")
        return data


def origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", parts.port or default


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirect handler: it sends the token to no other origin and never leaves https for http."""

    max_redirections = 8

    def __init__(self, endpoint: str, token: str | None) -> None:
        self._endpoint = endpoint
        self._token = token
        self.etag: str | None = None

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _check_scheme(newurl)
        if req.type == "https" and urlsplit(newurl).scheme != "https":
            raise urllib.error.URLError(f"redirected from https to {urlsplit(newurl).scheme}: refused")
        self.etag = self.etag or _etag(headers)
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and self._token and origin(newurl) == origin(self._endpoint):
            following.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return following


def _open(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout: float) -> Any:
    try:
        return opener.open(request, timeout=timeout)
    except ValueError as error:  # a redirect to what is no URL
        raise urllib.error.URLError(str(error)) from None


def _answer(response: http.client.HTTPResponse, etag: str | None) -> HubResponse:
    start, total = 0, None
    if response.status == 206:
        unit, _, rest = (response.headers.get("Content-Range") or "").partition(" ")
        span, _, size = rest.partition("/")
        first = span.partition("-")[0]
        offset, total = _number(first), _number(size)
        if unit != "bytes" or offset is None:
            raise http.client.HTTPException("a partial answer without its range")
        start = offset
    else:
        total = _number(response.headers.get("Content-Length", ""))
    return HubResponse(response, start, total, etag or _etag(response.headers))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _etag(headers: Message) -> str | None:
    text = headers.get("X-Linked-Etag") or headers.get("ETag")
    return text.removeprefix("W/").strip('"') if text else None


def _check_scheme(url: str) -> None:
    if urlsplit(url).scheme not in {"http", "https"}:
        raise urllib.error.URLError(f"{urlsplit(url).scheme} is not a supported URL scheme for models")


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
            self.problem = f"{self._host!r} is not a host name"
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
