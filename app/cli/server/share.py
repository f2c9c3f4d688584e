"""`llmbox share`: let other devices on the network use this box, in one guided command, and its undo.

The settings go to the user's file, as `llmbox config set` writes them, and the daemon is restarted. The
values from before are kept beside the keys until `llmbox share --off`.
"""

import contextlib
import hashlib
import json
import shlex
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from ...config.entries import Scalar
from ...config.loader import load_settings, read_file, remove_value, set_value
from ...config.settings import schema
from ...errors import CliError, Exit
from ...http.server.sockets import NetworkAddress, lan_addresses
from ...lifecycle.instance import RunningDaemon, find_running
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util.atomic_file import write_whole
from .. import output
from ..admin.key import bad_key, forget_stored, revoke
from ..output import require_consent
from .lifecycle import restart_daemon
from .up import sign_in_link

CHANGED = ("server.host", "server.tls", "server.mdns")
"""Settings that sharing writes."""
START_TIMEOUT = 600.0
"""Longest wait, in seconds, until the models that were in memory are loaded again."""


@click.command(cls=Command)
@click.option("--off", is_flag=True, help="Undo it: restore the settings and revoke the created key.")
@click.option(
    "--address", metavar="ADDR", help="Listen on this address only; default: all addresses of the machine."
)
@click.option(
    "--key",
    "key_name",
    default="lan",
    show_default=True,
    metavar="NAME",
    help="Key for the other devices; it is created if it does not exist.",
)
@click.option(
    "--tls/--no-tls",
    default=None,
    help="Encrypt with HTTPS (default), or send keys in the clear and print no sign-in link.",
)
@click.option("--mdns/--no-mdns", default=None, help="Announce the daemon on the network; default: no.")
@click.option("--yes", is_flag=True, help="Do not ask: use HTTPS, no announcement, restart the daemon.")
@json_option
@pass_program
def share(
    program: Program,
    /,
    *,
    off: bool,
    address: str | None,
    key_name: str,
    tls: bool | None,
    mdns: bool | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Let other devices on your network use this machine's models.

    Creates an API key, enables HTTPS, restarts the daemon so that it listens on the network, and prints
    addresses, the key, and a QR code that signs a phone in to the panel. Every request from another device
    needs a key. Undo it with llmbox share --off.
    """
    if off:
        _unshare(program, yes=yes, as_json=as_json)
        return
    found = lan_addresses()
    if address is not None:
        found = [_own_address(address, found)]
    if not found:
        raise CliError(
            "this machine has no address that other devices could use",
            "only loopback, or the network is down",
            "connect it to a network, then llmbox share again",
        )
    asks = sys.stdin.isatty() and not yes and not as_json
    if asks:
        tls, mdns = _ask_choices(found, tls, mdns)
    host = address or "0.0.0.0"  # noqa: S104 - the purpose of the command
    wanted: dict[str, Scalar] = {"server.host": host, "server.tls": tls is not False}
    wanted["server.mdns"] = bool(mdns)
    if mdns:
        _require_zeroconf()
    _require_file_decides(program)
    running = find_running(program.paths)
    doing = "Restart the daemon? Open requests finish first" if running else "Start the daemon"
    require_consent(doing, "nothing was shared", yes=yes, as_json=as_json)
    name, secret = _take_key(program, key_name)
    try:
        _change(program, wanted, name if secret else None)
    except (CliError, KeyboardInterrupt):
        now = find_running(program.paths)
        if now is not None and now != running:  # a model has failed, say: the secret must not be lost
            _show(program, found, name, secret, as_json=as_json)
        raise
    _show(program, found, name, secret, as_json=as_json)


def _own_address(text: str, found: Sequence[NetworkAddress]) -> NetworkAddress:
    for each in found:
        if each.address == text:
            return each
    there = ", ".join(each.address for each in found) or "none"
    raise CliError(
        f"{text[:64]} is not a network address of this machine",
        f"its addresses are: {there}",
        "llmbox share listens on all of them",
        Exit.USAGE,
    )


def _ask_choices(found: Sequence[NetworkAddress], tls: bool | None, mdns: bool | None) -> tuple[bool, bool]:
    output.say("Other devices on your network can then use this box. Each request needs a key.")
    output.say("Addresses: " + ", ".join(f"{each.address} ({each.interface})" for each in found))
    if tls is None:
        question = "Encrypt with HTTPS? Browsers warn once, as the certificate is made on this machine"
        tls = click.confirm(question, default=True, err=True)
    if mdns is None:
        question = f"Announce it on the network as “llmbox on {socket.gethostname().partition('.')[0]}”"
        mdns = click.confirm(question, default=False, err=True)
    return tls, mdns


def _require_zeroconf() -> None:
    from importlib.util import find_spec

    from ...diagnostics.updates import add_package_command

    if find_spec("zeroconf") is None:
        raise CliError(
            "the announcement by mDNS is not installed",
            "it needs the package zeroconf",
            add_package_command("zeroconf"),
        )


def _require_file_decides(program: Program) -> None:
    """Refuse where the environment sets one of the settings: the file would have no effect."""
    origins = program.settings().origins
    for name in CHANGED:
        if origins[name].source == "env":
            raise CliError(
                f"{name} cannot be changed",
                f"the variable {origins[name].place} sets it",
                f"unset {origins[name].place}, then try again",
                Exit.CONFLICT,
            )


def _take_key(program: Program, name: str) -> tuple[str, str]:
    """Return the key's name, and its secret if the key is made now: those of others are not kept."""
    import msgspec

    from ...security.key_store import KeyStore
    from ...security.keys import KeySpec

    program.paths.create()
    store = KeyStore(program.paths.keys_file)
    store.check()
    if any(each.name == name for each in store.list()):
        return name, ""
    try:
        spec = msgspec.convert({"name": name, "scopes": ["infer"]}, KeySpec)
    except msgspec.ValidationError as error:
        raise bad_key(name, str(error)) from None
    return name, store.add(spec)[1]


def _change(program: Program, wanted: dict[str, Scalar], made_key: str | None) -> None:
    """Write the settings and restart; where no new daemon runs, all is as before and the key made is gone."""
    file, kept = program.paths.config_file, program.paths.share_file
    running = find_running(program.paths)
    known = _read_share(program)
    earlier = None if known is None else kept.read_bytes()
    values = read_file(file)
    before = {name: values[name][0] for name in CHANGED if name in values}
    known = known or {"before": before, "keys": []}
    known["keys"] += [made_key] if made_key else []
    with _one_interrupt() as ignore:
        try:
            write_whole(kept, json.dumps(known).encode())
            for name, value in wanted.items():
                set_value(file, schema()[name], value)
            restart_daemon(program, now=False, timeout=START_TIMEOUT, without=CHANGED)
        except (CliError, KeyboardInterrupt) as error:
            ignore()
            now = find_running(program.paths)
            if now is None or now == running:
                _undo(program, before, earlier, made_key)
                stopped = now is None or isinstance(error, KeyboardInterrupt)  # the old one may be draining
                start = " If the daemon has stopped, start it with llmbox up." if stopped else ""
                output.say(f"\nThe settings are as before.{start}")
            raise


def _undo(program: Program, before: dict[str, Any], earlier: bytes | None, made_key: str | None) -> None:
    from ...security.key_store import KeyStore

    if made_key:
        KeyStore(program.paths.keys_file).remove(made_key)
    _write_back(program, before)
    if earlier is None:
        program.paths.share_file.unlink(missing_ok=True)
    else:
        write_whole(program.paths.share_file, earlier)


@contextlib.contextmanager
def _one_interrupt() -> Iterator[Callable[[], object]]:
    """Let the first Ctrl-C inside raise and ignore all later ones, so that none cuts an undo short. Yields a
    function that ignores the first one too.
    """

    def ignore() -> object:
        return signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupt(*_: object) -> None:
        ignore()
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGINT, interrupt)
    try:
        yield ignore
    finally:
        signal.signal(signal.SIGINT, earlier)


def _write_back(program: Program, values: dict[str, Any]) -> None:
    for name in CHANGED:
        if name in values:
            set_value(program.paths.config_file, schema()[name], values[name])
        else:
            remove_value(program.paths.config_file, schema()[name])


def _read_share(program: Program) -> dict[str, Any] | None:
    try:
        known: dict[str, Any] = json.loads(program.paths.share_file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return known


def _unshare(program: Program, *, yes: bool, as_json: bool) -> None:
    from ...security.key_store import KeyStore

    known = _read_share(program)
    if known is None:
        raise CliError(
            "this machine was not shared with llmbox share",
            f"there is no {program.paths.share_file}",
            "llmbox config get server.host says where it listens",
            Exit.NOT_FOUND,
        )
    store = KeyStore(program.paths.keys_file)
    store.check()
    there = {each.name for each in store.list()}
    revoked = [name for name in known["keys"] if name in there]
    question = "Stop sharing" + (f", revoke {', '.join(revoked)}" if revoked else "")
    if find_running(program.paths) is not None:
        question += " and restart the daemon"
    require_consent(question, "nothing was changed", yes=yes, as_json=as_json)
    for name in revoked:  # first: they are refused even if the daemon does not come back
        revoke(program, store, name)
    forget_stored(program)
    _write_back(program, known["before"])
    if find_running(program.paths) is not None:
        restart_daemon(program, now=False, timeout=START_TIMEOUT, without=CHANGED)
    program.paths.share_file.unlink(missing_ok=True)
    host = load_settings(program.paths, program.environ, {}).settings.server.host
    if as_json:
        output.write_json("share", {"shared": False, "host": host, "revoked": revoked})
        return
    output.say(f"Sharing has ended. The daemon listens on {host}." + _revoked_text(revoked))


def _revoked_text(names: Sequence[str]) -> str:
    return f" Revoked: {', '.join(names)}." if names else ""


def _show(program: Program, found: Sequence[NetworkAddress], key: str, secret: str, *, as_json: bool) -> None:
    running = find_running(program.paths)
    assert running is not None  # `_change` raised otherwise
    roots = [_reached_at(running, each.address) for each in found]
    fingerprint = certificate_fingerprint(Path(running.certificate)) if running.certificate else ""
    if as_json:
        sign_in = _sign_in(program, running, roots[0])
        data = {"shared": True, "urls": [f"{root}/v1" for root in roots], "sign_in": sign_in or None}
        data |= {"key": key, "secret": secret or None, "certificate": running.certificate or None}
        output.write_json("share", {**data, "certificate_sha256": fingerprint or None})
        return
    _show_addresses(roots, key, secret, fingerprint)
    _show_sign_in(_sign_in(program, running, roots[0]))
    output.write("A program on another machine:")
    output.write(f"  export OPENAI_BASE_URL={roots[0]}/v1 OPENAI_API_KEY=KEY")
    if running.certificate:
        output.write(f"  and copy {running.certificate} there: export SSL_CERT_FILE=$PWD/certificate.pem")
    output.write("")
    output.write(f"No connection? The firewall must let TCP port {running.port} in.")
    output.write(f"Undo: {shlex.join(['llmbox', *program.location_flags])} share --off")


def _show_addresses(roots: Sequence[str], key: str, secret: str, fingerprint: str) -> None:
    output.write("llmbox is shared on your network.")
    for root in roots:
        output.write(f"  API     {root}/v1")
    output.write(f"  Panel   {roots[0]}/admin")
    if secret:
        output.write(f"  Key     {secret}")
        output.write(f"          (named {key}; shown this once)")
    else:
        output.write(f"  Key     {key}, which exists; a new secret: llmbox key rotate {shlex.quote(key)}")
    if fingerprint:
        output.write(f"  TLS     SHA-256 {fingerprint}")
        output.write("          (a browser that warns shows the same: then go on)")
    output.write("")


def _show_sign_in(sign_in: str) -> None:
    """Show the link that signs another device in, and its QR code on a terminal; else why there is none."""
    if sign_in:
        output.write(
            "Phone or tablet: scan this, or open the link. It signs one browser in, within 15 minutes."
        )
        if sys.stdout.isatty():
            output.write(qr_text(sign_in))
        output.write(f"  {sign_in}")
    else:
        output.write("Without HTTPS there is no sign-in link for other devices, as others could read it.")
        output.write(
            "Open the panel on this machine (llmbox up --open), or share with HTTPS: llmbox share --tls"
        )
    output.write("")


def _sign_in(program: Program, running: RunningDaemon, root: str) -> str:
    """Return a link for other devices; empty without HTTPS, where anyone who listens could use it."""
    if not running.certificate:
        return ""
    link = urlsplit(sign_in_link(program))
    return f"{root}{link.path}?{link.query}"


def _reached_at(running: RunningDaemon, address: str) -> str:
    return f"{'https' if running.certificate else 'http'}://{address}:{running.port}"


def certificate_fingerprint(file: Path) -> str:
    """Return the SHA-256 of the file's first certificate, as browsers show it."""
    end = "-----END CERTIFICATE-----"
    first = file.read_text("ascii").partition(end)[0].partition("-----BEGIN")[2]
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(f"-----BEGIN{first}{end}")).hexdigest().upper()
    return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))


def qr_text(link: str) -> str:
    """Draw a QR code with half blocks, two rows a line: black on white in light and dark terminals."""
    import segno

    rows = [list(row) for row in segno.make(link, micro=False, error="l").matrix_iter(border=4)]
    rows += [[0] * len(rows[0])] * (len(rows) % 2)
    blocks = {(0, 0): " ", (1, 0): "▀", (0, 1): "▄", (1, 1): "█"}
    pairs = zip(rows[::2], rows[1::2], strict=True)
    lines = ["".join(blocks[pair] for pair in zip(upper, lower, strict=True)) for upper, lower in pairs]
    return "\n".join(f"  \x1b[30;107m{line}\x1b[0m" for line in lines)
