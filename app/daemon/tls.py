"""TLS of the API: the owner's certificate, or one that llmbox makes for itself and renews at a start.

The self-made one is a certificate of its own authority: clients trust it by its file (`SSL_CERT_FILE`,
`curl --cacert`). It names this machine's host name and addresses.
"""

import datetime as dt
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.paths import Paths
from ..config.settings import ServerSettings
from ..errors import CliError, Exit
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
        certificate, key = Path(server.tls_certificate).expanduser(), Path(server.tls_key).expanduser()
    else:
        certificate, key = self_made_certificate(paths.tls_dir, machine_names(server.host))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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
