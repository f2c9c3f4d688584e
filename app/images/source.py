"""Image as a request has it: as a file on this machine that a command sends, or by a URL, fetched from the
public Internet and from nowhere else.

A URL of a request must not reach what only this machine or its network reaches. So each name is resolved
once, all of its addresses have to be public, and the connection goes to the first of these that answers.
Redirects are checked in the same way. Proxies of the environment are not used: they would resolve names
themselves.
"""

import asyncio
import base64
import contextlib
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from llmbox.engine.checkpoint.files import read_regular

from ..errors import CliError, Exit

FILE_BYTES: Final = 24 << 20
"""Largest file that a command reads: in base64 it is the longest body that a daemon takes by default."""
_SIGNS: Final = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"))
_PATH: Final = re.compile(
    r"""'(?P<quoted>(?:~|\.{0,2})/[^'\n]+)'"""
    r'''|"(?P<double>(?:~|\.{0,2})/[^"\n]+)"'''
    r"""|(?<!\S)(?P<plain>(?:~|\.{0,2})/(?:\\.|[^\s\\'"])+)"""
)
"""Path in a prompt: quoted, or with its blanks escaped, as terminals write a file that is dropped on them."""
_SUFFIXES: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif")


@dataclass(frozen=True, slots=True)
class ImageSource:
    url: str
    """`data:` URL with base64, or a URL to fetch."""
    low_detail: bool
    param: str
    """Place in the request, for errors."""


def read_image_url(text: str) -> str:
    """Return an image's file as a `data:` URL. Raises CliError."""
    try:
        data = read_regular(Path(text).expanduser(), FILE_BYTES)
    except FileNotFoundError:
        raise CliError(f"no file {text}", "it does not exist", "name an image", Exit.NOT_FOUND) from None
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CliError(f"{text} cannot be read", why, "name an image that you can read") from None
    kind = next((kind for sign, kind in _SIGNS if data.startswith(sign)), "")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if not kind:
        raise CliError(
            f"{text} is not an image that can be sent",
            "it is not a PNG, JPEG, WebP or GIF",
            "convert it to one of these",
        )
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def split_image_paths(text: str) -> tuple[str, list[str]]:
    """Return a prompt without the paths of images in it that exist, and these paths."""
    found = []

    def cut(match: re.Match[str]) -> str:
        plain = match["plain"] or ""
        bare = plain.rstrip(".,;:?!)")
        path = match["quoted"] or match["double"] or re.sub(r"\\(.)", r"\1", bare)
        try:
            is_image = path.lower().endswith(_SUFFIXES) and Path(path).expanduser().is_file()
        except (OSError, RuntimeError):
            is_image = False
        if not is_image:
            return match[0]
        found.append(path)
        return plain[len(bare) :]

    left = _PATH.sub(cut, text)
    return (" ".join(left.split()) if found else text), found


SECONDS: Final = 15.0
"""Time for everything: names, connections, redirects and the image."""
CONNECT_SECONDS: Final = 3.0
"""Time for one address of a name that has more."""
MOST_ADDRESSES: Final = 4
"""Addresses of a name to try."""
MOST_REDIRECTS: Final = 3
MOST_URL: Final = 4096
MOST_PARTS: Final = 32_768
"""Parts that a body may arrive in: a server that sends single bytes as chunks must not hold up the loop."""
_CHUNK: Final = 1 << 14
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_OK: Final = 200
Resolve = Callable[[str, int], Awaitable[list[str]]]
_EMBEDDING: Final = (
    (ipaddress.ip_network("64:ff9b::/96"), 0),
    (ipaddress.ip_network("::/96"), 0),
    (ipaddress.ip_network("2002::/16"), 80),
)
"""Networks whose addresses hold an IPv4 address, and the bits behind it: NAT64, the old mapping, 6to4."""

_LOCAL_NAT64: Final = ipaddress.ip_network("64:ff9b:1::/48")


class FetchError(Exception):
    """Image that is not fetched, with the reason."""


def is_public(address: str) -> bool:
    """Return whether an address belongs to the public Internet: not to this machine, its network, a multicast
    group or a reserved range, and does not embed an IPv4 address that does.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped
        for network, bits in _EMBEDDING:
            if found in network:
                inner = ipaddress.IPv4Address((int(found) >> bits) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.teredo is not None or found.is_site_local or found in _LOCAL_NAT64:
            return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def is_own(address: str) -> bool:
    """Return whether a public address is this machine's: a firewall may shield what listens there. Nothing is
    sent.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    family = socket.AF_INET if found.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(found), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == found
    except OSError:  # there is no way to it
        return False


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def fetch_image(
    url: str, most_bytes: int, find_addresses: Resolve = resolve, *, seconds: float = SECONDS
) -> bytes:
    """Return the body of a URL, which may take `seconds`. Raises FetchError."""
    try:
        async with asyncio.timeout(seconds):
            for _ in range(MOST_REDIRECTS + 1):
                target, body = await _get(url, most_bytes, find_addresses)
                if target is None:
                    return body
                url = urljoin(url, target)
    except TimeoutError:
        raise FetchError(f"its URL did not give a complete image in time ({seconds:.3g} s)") from None
    except (OSError, ssl.SSLError, h11.ProtocolError, UnicodeError, ValueError):
        raise FetchError("its URL cannot be fetched") from None
    raise FetchError(f"its URL redirects more than {MOST_REDIRECTS} times")


async def _get(url: str, most_bytes: int, find_addresses: Resolve) -> tuple[str | None, bytes]:
    """Send one request. Returns where it redirects to, or None and the body."""
    parts = urlsplit(url)
    host, port = _check_url(url, parts)
    addresses = await find_addresses(host, port)
    if not addresses or not all(map(is_public, addresses)) or any(map(is_own, addresses)):
        raise FetchError("its URL does not lead to the public Internet")
    context = ssl.create_default_context() if parts.scheme == "https" else None
    reader, writer = await _connect(list(dict.fromkeys(addresses)), host, port, context)
    try:
        connection = h11.Connection(h11.CLIENT)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = [("Host", parts.netloc), ("Accept", "image/*"), ("Accept-Encoding", "identity")]
        headers += [("User-Agent", "llmbox"), ("Connection", "close")]
        request = connection.send(h11.Request(method="GET", target=target, headers=headers))
        assert request is not None
        writer.write(request)
        await writer.drain()
        return await _receive(connection, reader, most_bytes)
    finally:
        writer.close()


async def _connect(
    addresses: list[str], host: str, port: int, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first of the addresses that answers. Raises the error of the last one."""
    name = host if context is not None else None
    for address in addresses[: MOST_ADDRESSES - 1]:
        if address == addresses[-1]:
            break
        with contextlib.suppress(OSError):
            async with asyncio.timeout(CONNECT_SECONDS):
                return await asyncio.open_connection(address, port, ssl=context, server_hostname=name)
    return await asyncio.open_connection(addresses[-1], port, ssl=context, server_hostname=name)


def _check_url(url: str, parts: SplitResult) -> tuple[str, int]:
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise FetchError("its URL is neither http nor https")
    if parts.username is not None or parts.password is not None or len(url) > MOST_URL:
        raise FetchError(f"its URL has a password or more than {MOST_URL} characters")
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


async def _receive(
    connection: h11.Connection, reader: asyncio.StreamReader, most_bytes: int
) -> tuple[str | None, bytes]:
    body, parts = bytearray(), 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_CHUNK))
            await asyncio.sleep(0)  # `read` does not wait while there are bytes
        elif isinstance(event, h11.Response):
            headers = {name: value.decode("latin-1") for name, value in event.headers}
            if event.status_code in _REDIRECTS and b"location" in headers:
                return headers[b"location"], b""
            if event.status_code != _OK:
                raise FetchError(f"its URL answered with status {event.status_code}")
        elif isinstance(event, h11.Data):
            body += event.data
            parts += 1
            if parts > max(MOST_PARTS, most_bytes // 512):
                raise FetchError("its server sends it in too small parts")
            if len(body) > most_bytes:
                raise FetchError(f"it has more than {most_bytes:,} bytes (limits.image_bytes)")
        elif isinstance(event, h11.EndOfMessage):
            return None, bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise FetchError("its URL ended the connection")
