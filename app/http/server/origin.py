"""Host and Origin checks: exact Host names (DNS rebinding) and no foreign web pages (cross-site requests)."""

import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ...errors import ApiError
from .errors import error_type

_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}
_SCHEMES = {b"http", b"https"}
_OWN_SITES = {b"same-origin", b"none"}
_ALWAYS = ("localhost", "llmbox")


class HostList:
    """Allowed Host values: the address connected to, this machine's names, configured names.

    `configured` entries with a port match exactly; without one they match with the listening port or none.
    """

    def __init__(self, configured: Iterable[str] = (), machine: str | None = None) -> None:
        self._machine = (machine if machine is not None else socket.gethostname()).lower()
        self._configured = tuple(name.lower() for name in configured)
        self._by_address: dict[tuple[str, int | None], frozenset[bytes]] = {}

    def allows(self, scope: Any, host: bytes) -> bool:
        address = scope["server"] or ("", None)
        known = self._by_address.get(address)
        if known is None:
            known = self._by_address[address] = frozenset(self._names(*address))
        return host.lower() in known

    def _names(self, address: str, port: int | None) -> Iterable[bytes]:
        """Yield the Host values of one address. `port` is None for a unix socket, which has no name."""
        own = {
            *_ALWAYS,
            self._machine,
            f"{self._machine}.local",
            f"{self._machine.partition('.')[0]}.local",  # the name that mDNS announces
            *(name for name in self._configured if not _has_port(name)),
        }
        if port is not None:
            own.add(f"[{address}]" if ":" in address else address)
        bare = own if port in {None, 80} else {name for name in self._configured if not _has_port(name)}
        with_port = {f"{name}:{port}" for name in own} if port is not None else set()
        for name in {*bare, *with_port, *self._configured}:
            yield name.encode("latin-1", "replace")


def _has_port(name: str) -> bool:
    return name.rpartition(":")[2].isdigit() and not name.endswith("]")


def take_target(target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return path and query of a request target in absolute form, such as `http://localhost/v1/models`. Its
    host replaces the Host header (RFC 9112, 3.2.2), so that `check_host` sees it. Other targets, and those
    beside several Host headers, are returned as they are.
    """
    scheme, separator, rest = target.partition(b"://")
    authority = re.match(rb"[^/?@#]+(?=[/?]|$)", rest)
    others = [pair for pair in headers if pair[0] != b"host"]
    is_single = len(headers) - len(others) <= 1
    if not separator or scheme.lower() not in _SCHEMES or authority is None or not is_single:
        return target
    headers[:] = [(b"host", authority[0]), *others]
    path = rest[authority.end() :]
    return path if path.startswith(b"/") else b"/" + path


def check_host(hosts: HostList, scope: Any, values: list[bytes]) -> None:
    if len(values) != 1 or not hosts.allows(scope, values[0]):
        raise ApiError(
            421,
            "This server does not accept the request's Host header. Add the name to server.allowed_hosts.",
            "host_not_allowed",
        )


def check_origin(hosts: HostList, scope: Any, headers: dict[bytes, bytes]) -> None:
    """Refuse cross-site browser requests. Other clients send neither header.

    A foreign Origin is refused on every method; a cross-site request only passes as a plain navigation.
    """
    origin = headers.get(b"origin")
    site = headers.get(b"sec-fetch-site")
    if origin is not None and not _is_own_origin(hosts, scope, origin):
        raise _cross_site()
    if site is None or site in _OWN_SITES:
        return
    mode, target = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    navigates = mode == b"navigate" and target == b"document"
    if scope["method"] not in _SAFE_METHODS or not navigates:
        raise _cross_site()


def is_from_browser(headers: dict[bytes, bytes]) -> bool:
    """Return True if a web page may have sent it: browsers name the origin of a request that has a body."""
    return b"origin" in headers or b"sec-fetch-site" in headers


def _is_own_origin(hosts: HostList, scope: Any, origin: bytes) -> bool:
    try:
        parts = urlsplit(origin.decode("ascii"))
    except ValueError:  # not ASCII, or brackets that do not match
        return False
    own = parts.scheme in {"http", "https"} and not (parts.path or parts.query or parts.fragment)
    return own and hosts.allows(scope, parts.netloc.encode())


def _cross_site() -> ApiError:
    message = "Requests from other web pages are refused. Add the page's origin to server.cors_origins."
    return ApiError(403, message, "cross_site_request", None, error_type(403))


Header = tuple[bytes, bytes]

_ASKS = b"access-control-request-method"
_METHODS = b"GET, HEAD, POST, DELETE"
_NAMES = re.compile(rb"[A-Za-z0-9-]{1,64}(?: *, *[A-Za-z0-9-]{1,64}){0,63}")
_READABLE = (
    b"x-request-id, openai-processing-ms, retry-after, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    b"x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_SECONDS = b"600"


class Cors:
    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origin.lower().encode() for origin in origins)

    def allowed(self, path: str, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the request's foreign origin if the configuration allows it here."""
        origin = headers.get(b"origin")
        if origin is None or origin.lower() not in self._origins or _is_admin(path):
            return None
        return origin


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return True for a CORS preflight."""
    return method == "OPTIONS" and _ASKS in headers


def readable_by(origin: bytes) -> list[Header]:
    """Return the CORS headers of every answer to an allowed page, errors included."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _READABLE),
        (b"vary", b"Origin"),
    ]


def preflight_headers(headers: Mapping[bytes, bytes]) -> list[Header]:
    """Return the headers of a preflight's answer. Any request header may be sent: clients have many of their
    own, and none means anything to us but the keys.
    """
    found = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _SECONDS)]
    names = headers.get(b"access-control-request-headers", b"").strip()
    if _NAMES.fullmatch(names):
        found.append((b"access-control-allow-headers", names))
    if headers.get(b"access-control-request-private-network") == b"true":
        found.append((b"access-control-allow-private-network", b"true"))
    return found


def _is_admin(path: str) -> bool:
    """Return True for admin paths, however many slashes they begin with: routing ignores them."""
    return next((part for part in path.split("/") if part), "") == "admin"
