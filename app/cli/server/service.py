"""`llmbox service` and `llmbox uninstall`: the daemon under systemd, and removal of llmbox's files."""

import os
import pwd
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from ...diagnostics import systemd
from ...diagnostics.systemd import (
    NAME,
    SYSTEM_DATA,
    SYSTEM_USER,
    UnitSpec,
    quote_argument,
    read_status,
    remove_unit,
    run_tool,
    systemctl,
    unit_file,
    unit_text,
    write_denied,
)
from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util import formatting
from ...util.atomic_file import write_whole
from .. import output
from ..output import require_consent
from ..root import CommandGroup
from .lifecycle import stop

F = TypeVar("F", bound=Callable[..., Any])

PROTECTED = ("/home", "/root", "/run/user")
"""Folders that a hardened service of the machine cannot read."""


def scope_option(function: F) -> F:
    return click.option(
        "--system/--user",
        "system",
        default=None,
        help="For the machine, or for this user only; default: the machine for root, otherwise the user.",
    )(function)


@click.group(cls=CommandGroup)
def service() -> None:
    """Run the daemon under systemd.

    The unit holds no settings: those stay in config.toml.
    """


@service.command()
@scope_option
@click.option("--print", "only_print", is_flag=True, help="Print the unit; change nothing.")
@pass_program
def install(program: Program, *, system: bool | None, only_print: bool) -> None:
    """Write the unit, start it, and start it again at every boot (--user: at every login)."""
    system = _scope(system)
    text = unit_text(_spec(program, system=system))
    if only_print:
        output.write(text.rstrip("\n"))
        return
    _require_systemd()
    if system:
        _prepare_machine(program)
    if (running := find_running(program.paths)) is not None and not system:
        raise CliError(
            "a daemon runs on these files",
            f"pid {running.pid}; the service would be refused",
            "llmbox down, then try again",
            Exit.CONFLICT,
        )
    file = unit_file(program, system=system)
    _write(file, text)
    systemctl(program, system, "daemon-reload")
    systemctl(program, system, "enable", "--now", NAME)
    output.say(f"{file} is installed and started.")
    output.say(f"  State    llmbox service status {_flag(system)}")
    output.say(f"  Log      journalctl {'' if system else '--user '}-u {NAME}")
    if system:
        output.say(f"  Commands sudo -u {SYSTEM_USER} llmbox --data-dir {SYSTEM_DATA} up (and all others)")
    else:
        output.say("  It ends when you log out, unless: loginctl enable-linger")


@service.command()
@scope_option
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only set the exit code.")
@pass_program
def status(program: Program, *, system: bool | None, as_json: bool, quiet: bool) -> int:
    """Show whether the service is installed and runs; exit 3 when it is not running."""
    system = _scope(system)
    facts = read_status(program, system=system)
    if as_json:
        output.write_json("service", facts)
    elif not quiet:
        _print_status(facts)
    return Exit.OK if facts["active"] == "active" else Exit.UNREACHABLE


@service.command("uninstall")
@scope_option
@pass_program
def uninstall_unit(program: Program, *, system: bool | None) -> None:
    """Stop the service and remove its unit. Models, keys and settings stay."""
    system = _scope(system)
    if not remove_unit(program, system=system):
        raise CliError(
            f"there is no unit {unit_file(program, system=system)}",
            "nothing to remove",
            "llmbox service status",
            Exit.NOT_FOUND,
        )
    output.say("The service is gone; models, keys and settings stay.")


def _print_status(facts: dict[str, Any]) -> None:
    unit = facts["unit"] if facts["installed"] else f"not installed ({facts['unit']} does not exist)"
    output.write(f"Unit     {unit}")
    if not facts["systemd"]:
        output.write("State    this machine does not run systemd: use llmbox up, or your own supervisor with")
        output.write("         llmbox serve")
        return
    pid = f", pid {facts['pid']}" if facts["pid"] else ""
    detail = f" ({formatting.printable(facts['detail'])})" if facts["detail"] else ""
    output.write(f"State    {facts['active']}{detail}{pid}")
    output.write(f"At boot  {facts['enabled']}")
    if not facts["installed"]:
        output.say(f"Install it: llmbox service install {_flag(facts['scope'] == 'system')}")


def _scope(system: bool | None) -> bool:
    return os.geteuid() == 0 if system is None else system


def _flag(system: bool) -> str:
    return "--system" if system else "--user"


def _spec(program: Program, *, system: bool) -> UnitSpec:
    command = [*program.command, *program.location_flags]
    if system:
        if program.data_dir not in {None, SYSTEM_DATA} or program.config is not None:
            raise CliError(
                "the system service has its files in one place",
                f"it is {SYSTEM_DATA}, with settings in /etc/llmbox/config.toml",
                "leave out --data-dir and --config, or use --user",
                Exit.USAGE,
            )
        command = [*program.command, "--data-dir", str(SYSTEM_DATA)]
    drain = program.settings().settings.server.drain_timeout
    return UnitSpec(system=system, command=command, drain=drain)


def _prepare_machine(program: Program) -> None:
    if os.geteuid() != 0:
        raise CliError(
            "only root can install a system service",
            f"this process runs as user id {os.geteuid()}",
            "sudo llmbox service install --system, or without root: --user",
            Exit.DENIED,
        )
    place = program.command[0]
    if place.startswith(tuple(f"{folder}/" for folder in PROTECTED)):
        raise CliError(
            f"the service could not read {place}",
            "it is kept out of home folders, and this installation lies in one",
            "install llmbox elsewhere (python3 -m venv /opt/llmbox), or use --user",
            Exit.DENIED,
        )
    if not _has_user():
        words = ["useradd", "--system", "--home-dir", str(SYSTEM_DATA), "--shell", "/usr/sbin/nologin"]
        run_tool([*words, SYSTEM_USER], program)
        output.say(f"Made the user {SYSTEM_USER}.")


def _has_user() -> bool:
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        return False
    return True


def _require_systemd() -> None:
    if not systemd.BOOTED.is_dir():
        raise CliError(
            "this machine does not run systemd",
            f"there is no {systemd.BOOTED}",
            "llmbox up, or llmbox serve under your own supervisor; --print shows the unit",
            Exit.FAILED,
        )


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text.encode())
        file.chmod(0o644)
    except OSError as error:
        raise write_denied(f"cannot write {file}", error) from error


PACKAGE_HOME = Path("/opt/llmbox")
"""Environment of the .deb and the .rpm (packaging/release.py)."""


@dataclass(frozen=True, slots=True)
class UninstallItem:
    what: str
    path: Path
    size: int


@click.command(cls=Command)
@click.option(
    "--models",
    is_flag=True,
    help="Also delete the models in the Hugging Face cache, which other programs may use.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; needs --yes.")
@pass_program
def uninstall(program: Program, *, models: bool, yes: bool, as_json: bool) -> None:
    """Remove settings, keys, logs, caches and services of llmbox. Models stay, unless --models is given.

    Remove the program itself with the tool that installed it.
    """
    items = list(_items(program, with_models=models))
    if not as_json:
        _announce(program, items, with_models=models)
    if not items:
        return
    require_consent("Remove all of it?", "nothing was removed", yes=yes, as_json=as_json)
    running = find_running(program.paths)
    if running is not None:
        stop(program, running, now=False, timeout=None)
    for system in _services(program):
        remove_unit(program, system=system)
    for item in items:
        _delete(item.path)
    _drop_empty_folders(program)
    freed = sum(item.size for item in items)
    if as_json:
        rows = [{"what": item.what, "path": str(item.path), "size": item.size} for item in items]
        output.write_json("uninstall", {"removed": rows, "freed": freed})
    else:
        output.say(f"Done: {formatting.size(freed)} freed. The program itself: {how_to_remove_program()}")


def _items(program: Program, *, with_models: bool) -> Iterator[UninstallItem]:
    """Yield the items that exist. Of a --data-dir that a user named only our own files are removed."""
    from ...models.catalog import hub_cache

    paths = program.paths
    found = [
        ("settings", paths.config_file),
        ("self-made certificate", paths.tls_dir),
        ("API keys", paths.keys_file),
        ("last-used times of keys", paths.keys_used_file),
        ("usage of keys", paths.keys_quota_file),
        ("aliases and adopted folders", paths.registry_file),
        ("settings before llmbox share", paths.share_file),
        ("secrets of MCP servers", paths.mcp_secrets_file),
        ("logs and request log", paths.state_dir),
        ("compiled kernels, repacked weights and KV cache", paths.cache_dir),
        ("sockets", paths.runtime_dir),
        *(
            (f"service ({'system' if each else 'user'})", unit_file(program, system=each))
            for each in _services(program)
        ),
    ]
    files = (paths.keys_file, paths.registry_file, paths.mcp_secrets_file)
    found += [("lock", file.with_suffix(".lock")) for file in files]
    copies = sorted(program.registry.adapters_home.glob("[0-9a-f]" * 32))
    found += [("copy of an adapter", folder) for folder in copies]
    if with_models:
        cache = hub_cache(program.environ)
        found += [("model", folder) for folder in sorted(cache.glob("models--*--*"))]
    for what, path in found:
        if path.exists() or path.is_symlink():
            yield UninstallItem(what, path, _size(path))


def _services(program: Program) -> list[bool]:
    """Return the scopes (True: the machine's) whose unit starts a daemon on these files, not on another
    --data-dir.
    """
    return [system for system in (False, True) if _is_ours(program, unit_file(program, system=system))]


def _is_ours(program: Program, unit: Path) -> bool:
    if not unit.is_file():
        return False
    text = unit.read_text("utf-8", "replace")
    if program.data_dir is None:
        return "--data-dir" not in text
    return f" {quote_argument(str(program.data_dir.absolute()))} " in text


def _size(path: Path) -> int:
    from ...hub.local_models import folder_size

    return folder_size(path) if path.is_dir() else path.lstat().st_size


def _announce(program: Program, items: list[UninstallItem], *, with_models: bool) -> None:
    if not items:
        output.say("No files of llmbox were found.")
        return
    output.say("This goes:")
    for item in items:
        output.say(f"  {formatting.size(item.size):>9}  {item.what}: {item.path}")
    if (running := find_running(program.paths)) is not None:
        output.say(f"The daemon (pid {running.pid}) is stopped first.")
    if not with_models:
        from ...models.catalog import hub_cache

        output.say(f"Models stay: {hub_cache(program.environ)} (--models deletes them too).")


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(
            f"cannot remove {path}",
            error.strerror or str(error),
            "fix its owner or mode, then try again",
            Exit.DENIED,
        ) from error


def _drop_empty_folders(program: Program) -> None:
    paths = program.paths
    for folder in (program.registry.adapters_home, paths.data_dir, paths.config_file.parent):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def how_to_remove_program() -> str:
    """Return the command that removes the program, guessed from where it is installed."""
    place = Path(sys.prefix)
    if "uv" in place.parts and "tools" in place.parts:
        return "uv tool uninstall llmbox"
    if "pipx" in place.parts:
        return "pipx uninstall llmbox"
    if place == PACKAGE_HOME:
        return "apt remove llmbox" if shutil.which("apt") else "dnf remove llmbox"
    return f"{sys.executable} -m pip uninstall llmbox"
