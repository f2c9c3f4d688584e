"""`llmbox service`: the daemon under systemd."""

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ...diagnostics import systemd
from ...diagnostics.systemd import (
    NAME,
    SYSTEM_DATA,
    SYSTEM_USER,
    UnitSpec,
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
from ...lifecycle.program import Command, Program, pass_program
from ...util import formatting
from ...util.atomic_file import write_whole
from .. import output
from ..root import CommandGroup

F = TypeVar("F", bound=Callable[..., Any])

PROTECTED = ("/home", "/root", "/run/user")
"""Folders that a hardened service of the machine cannot read."""


def scope_option(function: F) -> F:
    return click.option(
        "--system/--user",
        "system",
        default=None,
        help="For the machine, or for you alone; default is what you are.",
    )(function)


@click.group(cls=CommandGroup)
def service() -> None:
    """Run the daemon under systemd.

    The unit holds no settings: those stay in config.toml.
    """


@service.command(cls=Command)
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


@service.command(cls=Command)
@scope_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only set the exit code.")
@pass_program
def status(program: Program, *, system: bool | None, as_json: bool, quiet: bool) -> int:
    """Show whether the service is installed and runs; exit 3 when it does not run."""
    system = _scope(system)
    facts = read_status(program, system=system)
    if as_json:
        output.write_json("service", facts)
    elif not quiet:
        _print_status(facts)
    return Exit.OK if facts["active"] == "active" else Exit.UNREACHABLE


@service.command(cls=Command)
@scope_option
@pass_program
def uninstall(program: Program, *, system: bool | None) -> None:
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
                "the service of the machine has its files in one place",
                f"it is {SYSTEM_DATA}, with settings in /etc/llmbox/config.toml",
                "leave --data-dir and --config out, or use --user",
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
