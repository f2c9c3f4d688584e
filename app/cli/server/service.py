"""`llmbox service`: the daemon under systemd."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ...diagnostics.systemd import NAME, SYSTEM_DATA, SYSTEM_FOLDER, SYSTEM_USER, UnitSpec, unit_text
from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...util import formatting
from ...util.atomic_file import write_whole
from .. import output
from ..context import Program, pass_program
from ..root import Command, CommandGroup

F = TypeVar("F", bound=Callable[..., Any])

BOOTED = Path("/run/systemd/system")
"""Folder that exists while systemd runs the machine (sd_booted)."""
PROTECTED = ("/home", "/root", "/run/user")
"""Folders that a hardened service of the machine cannot read."""
FACTS = ("LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "StatusText")


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
    _systemctl(program, system, "daemon-reload")
    _systemctl(program, system, "enable", "--now", NAME)
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
    if not remove(program, system=system):
        raise CliError(
            f"there is no unit {unit_file(program, system=system)}",
            "nothing to remove",
            "llmbox service status",
            Exit.NOT_FOUND,
        )
    output.say("The service is gone; models, keys and settings stay.")


def unit_file(program: Program, *, system: bool) -> Path:
    if system:
        return SYSTEM_FOLDER / NAME
    config = program.environ.get("XDG_CONFIG_HOME")
    home = Path(program.environ.get("HOME") or "~").expanduser()
    return (Path(config) if config else home / ".config") / "systemd" / "user" / NAME


def read_status(program: Program, *, system: bool) -> dict[str, Any]:
    """Read the unit's state. Never raises: a machine without systemd is reported as such."""
    file = unit_file(program, system=system)
    facts: dict[str, Any] = {
        "systemd": BOOTED.is_dir(),
        "scope": "system" if system else "user",
        "unit": str(file),
        "installed": file.is_file(),
        "enabled": "unknown",
        "active": "unknown",
        "detail": "",
        "pid": None,
    }
    if not facts["systemd"]:
        return facts
    try:
        shown = _systemctl(program, system, "show", NAME, f"--property={','.join(FACTS)}")
    except CliError as error:
        return {**facts, "detail": error.why}
    told = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    return {
        **facts,
        "enabled": told.get("UnitFileState") or "no",
        "active": told.get("ActiveState", "unknown"),
        "detail": told.get("StatusText") or told.get("SubState", ""),
        "pid": int(told.get("MainPID") or 0) or None,
    }


def remove(program: Program, *, system: bool) -> bool:
    """Remove the unit. Returns True if there was one."""
    file = unit_file(program, system=system)
    if not file.is_file():
        return False
    if BOOTED.is_dir():
        _systemctl(program, system, "disable", "--now", NAME)
    try:
        file.unlink()
    except OSError as error:
        raise _denied(f"cannot remove {file}", error) from error
    if BOOTED.is_dir():
        _systemctl(program, system, "daemon-reload")
    return True


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
        _run([*words, SYSTEM_USER], program)
        output.say(f"Made the user {SYSTEM_USER}.")


def _has_user() -> bool:
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        return False
    return True


def _require_systemd() -> None:
    if not BOOTED.is_dir():
        raise CliError(
            "this machine does not run systemd",
            f"there is no {BOOTED}",
            "llmbox up, or llmbox serve under your own supervisor; --print shows the unit",
            Exit.FAILED,
        )


def _systemctl(program: Program, system: bool, *words: str) -> str:
    scope = [] if system else ["--user"]
    return _run(["systemctl", *scope, "--no-pager", *words], program)


def _run(command: list[str], program: Program) -> str:
    path = shutil.which(command[0], path=program.environ.get("PATH"))
    if path is None:
        raise CliError(f"there is no {command[0]}", "it is not on PATH", "llmbox service install --print")
    done = subprocess.run(  # noqa: S603 - a fixed program with fixed words
        [path, *command[1:]], capture_output=True, text=True, check=False, env=dict(program.environ)
    )
    if done.returncode != 0:
        why = (done.stderr or done.stdout).strip().splitlines()
        raise CliError(
            f"{' '.join(command[:4])} failed",
            why[-1] if why else f"exit code {done.returncode}",
            f"look at it: systemctl status {NAME}",
        )
    return done.stdout


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text.encode())
        file.chmod(0o644)
    except OSError as error:
        raise _denied(f"cannot write {file}", error) from error


def _denied(what: str, error: OSError) -> CliError:
    denied = isinstance(error, PermissionError)
    return CliError(
        what,
        error.strerror or str(error),
        "with sudo, or --user" if denied else "free some space",
        Exit.DENIED if denied else Exit.FAILED,
    )
