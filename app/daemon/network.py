"""Parts of a daemon that others on the network reach: TLS of the API, and its announcement by multicast DNS.

TLS takes the owner's certificate, or one that llmbox makes for itself and renews at a start: a certificate of
its own authority, which clients trust by its file (`SSL_CERT_FILE`, `curl --cacert`). It names this machine's
host name and addresses.

The announcement (RFC 6762, 6763) is off by default: it tells everybody on the network that a model server is
here.
"""

import asyncio
import datetime as dt
import ipaddress
import logging
import socket
import ssl
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from ..config.paths import Paths, expand_home
from ..config.settings import ServerSettings
from ..errors import ApiError, CliError, Exit
from ..http.server.errors import encode_error
from ..http.server.sockets import BRIDGES, is_loopback
from ..lifecycle.instance import RunningDaemon
from ..util.atomic_file import write_whole

if TYPE_CHECKING:
    from cryptography import x509

_VALID = dt.timedelta(days=825)
"""Longest validity that Apple's systems accept of an authority that the user added."""
_RENEWED = dt.timedelta(days=30)


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    context: ssl.SSLContext
    certificate: str
    """Path of the PEM file."""


def open_tls(server: ServerSettings, paths: Paths) -> TlsIdentity | None:
    """Load or make what HTTPS needs; None where `server.tls` is off.

    Raises CliError for files that do not serve.
    """
    if not server.tls:
        return None
    if bool(server.tls_certificate) != bool(server.tls_key):
        missing = "server.tls_key" if server.tls_certificate else "server.tls_certificate"
        raise CliError(
            f"{missing} is not set",
            "a certificate and its private key belong together",
            "set both, or neither for a certificate made by llmbox",
            Exit.USAGE,
        )
    if server.tls_certificate:
        certificate, key = expand_home(Path(server.tls_certificate)), expand_home(Path(server.tls_key))
    else:
        certificate, key = self_made_certificate(paths.tls_dir, machine_names(server.host))
    context = _HttpsContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise CliError(
            f"cannot use the certificate {certificate} with the key {key}",
            getattr(error, "strerror", None) or str(error),
            "both must be PEM files, the key without a password and of this certificate",
            Exit.USAGE,
        ) from error
    return TlsIdentity(context, str(certificate))


class _Handshake(ssl.SSLObject):
    """Handshake that answers a request in plain HTTP with 400. Its client would else see an empty reply."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    is_plain_http = False

    def do_handshake(self) -> None:
        if not self.is_plain_http:
            try:
                super().do_handshake()
            except ssl.SSLError as error:
                if error.reason != "HTTP_REQUEST":
                    raise
                self.is_plain_http = True
                self.outgoing.write(_plain_http_answer())
            else:
                return
        self.incoming.read()  # the request's body, until its client closes: a reset would destroy the answer
        raise ssl.SSLWantReadError


class _HttpsContext(ssl.SSLContext):
    sslobject_class = _Handshake

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any) -> Any:
        wrapped = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(wrapped, _Handshake)
        wrapped.incoming, wrapped.outgoing = incoming, outgoing
        return wrapped


def _plain_http_answer() -> bytes:
    text = "This port speaks HTTPS. Begin the address with https://."
    body = encode_error(ApiError(400, text, "https_required"))
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\nconnection: close\r\n\r\n".encode() + body


def machine_names(host: str) -> list[str]:
    """Names and addresses by which clients may call this machine."""
    import psutil  # noqa: PLC0415 - 30 ms that a start without TLS need not wait for

    machine = socket.gethostname()
    announced = f"{machine.partition('.')[0]}.local"  # by mDNS, which knows no domain
    found = ["localhost", "127.0.0.1", "::1", machine, f"{machine}.local", announced]
    for addresses in psutil.net_if_addrs().values():
        found += [
            each.address.partition("%")[0]
            for each in addresses
            if each.family in {socket.AF_INET, socket.AF_INET6}
        ]
    return list(dict.fromkeys([*found, host]))


def self_made_certificate(folder: Path, names: list[str]) -> tuple[Path, Path]:
    """Return (certificate, key): those there are, or new ones where they expire soon or lack a name."""
    from cryptography import x509  # noqa: PLC0415 - 0.1 s that a start without TLS need not wait for

    certificate, key = folder / "certificate.pem", folder / "key.pem"
    try:
        old = x509.load_pem_x509_certificate(certificate.read_bytes())
        known = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        left = old.not_valid_after_utc - dt.datetime.now(dt.UTC)
        if key.is_file() and left > _RENEWED and set(_general_names(names)) <= set(known):
            return certificate, key
    except (OSError, ValueError, x509.ExtensionNotFound):
        pass
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    certificate_pem, key_pem = _sign(names)
    write_whole(key, key_pem)
    write_whole(certificate, certificate_pem)
    return certificate, key


def _sign(names: list[str]) -> tuple[bytes, bytes]:
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, f"llmbox on {socket.gethostname()}"[:64])]
    )
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8
    return certificate.public_bytes(pem), private.private_bytes(pem, plain, serialization.NoEncryption())


def _general_names(names: list[str]) -> list["x509.GeneralName"]:
    from cryptography import x509  # noqa: PLC0415

    made: list[x509.GeneralName] = []
    for name in names:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            made.append(x509.DNSName(name))
        else:
            if not address.is_unspecified:
                made.append(x509.IPAddress(address))
    return made


def _refuse_password() -> str:
    raise ValueError("the private key has a password")


log = logging.getLogger("llmbox.daemon")

_PATIENCE: Final = 10.0
"""Seconds for the probes before an announcement, and for the farewell after it."""


def announced_addresses(host: str) -> list[str]:
    """Return the addresses that others may use for a daemon that listens on `host`."""
    if not ipaddress.ip_address(host).is_unspecified:
        return [host]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = [
        each.address.partition("%")[0]
        for name, addresses in psutil.net_if_addrs().items()
        if not name.startswith(BRIDGES)
        for each in addresses
        if each.family == family
    ]
    return [
        each
        for each in found
        if not (ipaddress.ip_address(each).is_loopback or ipaddress.ip_address(each).is_link_local)
    ]


class Announcement:
    """Service record of this daemon while it serves. Use it from the event loop; no method raises."""

    def __init__(self, server: ServerSettings, running: RunningDaemon) -> None:
        self._running = running
        self._is_wanted = server.mdns and not is_loopback(server.host)
        self._zeroconf: Any = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to announce. Does nothing unless `server.mdns` is set and others can connect."""
        if self._is_wanted and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._announce())

    async def withdraw(self) -> None:
        """Send the goodbye record (TTL 0), so that others forget the service at once."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._zeroconf is None:
            return
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._zeroconf.async_unregister_all_services()
                await self._zeroconf.async_close()
        except Exception as error:  # noqa: BLE001 - a third party's errors must not stop the shutdown
            log.warning("the mDNS announcement is not withdrawn: %s", str(error) or type(error).__name__)

    async def _announce(self) -> None:
        try:
            asynchronous, zeroconf = import_module("zeroconf.asyncio"), import_module("zeroconf")
        except ImportError:
            log.warning("server.mdns is set, but the package zeroconf is not installed: nothing is announced")
            return
        try:
            info = self._service(zeroconf.ServiceInfo)
            self._zeroconf = asynchronous.AsyncZeroconf(interfaces=announced_addresses(self._running.host))
            async with asyncio.timeout(_PATIENCE):
                await (await self._zeroconf.async_register_service(info, allow_name_change=True))
        except Exception as error:  # noqa: BLE001 - no network must not stop the daemon
            log.warning("nothing is announced by mDNS: %s", str(error) or type(error).__name__)
        else:
            log.info("announced by mDNS as %s", info.name)

    def _service(self, kind: Any) -> Any:
        machine = socket.gethostname().partition(".")[0]
        service = "_https._tcp.local." if self._running.certificate else "_http._tcp.local."
        return kind(
            service,
            f"llmbox on {machine}.{service}",
            port=self._running.port,
            parsed_addresses=announced_addresses(self._running.host),
            properties={"path": "/admin", "api": "/v1", "version": self._running.version},
            server=f"{machine}.local.",
        )
