"""Systemd unit of the daemon, for one user or for the machine: its text, its state, its removal.

Settings are never in it: they stay in the TOML file that every command reads, and change without a reload of
units. Its hardening was chosen with `systemd-analyze security`. Options that would stop the work are left
out: GPU drivers, and MCP servers that the daemon starts, map memory that is both writable and executable, so
there is no MemoryDenyWriteExecute; and clients are on the network.
"""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.paths import expand_home
from ..errors import CliError, Exit
from ..lifecycle.program import Program

BOOTED = Path("/run/systemd/system")
"""Folder that exists while systemd runs the machine (sd_booted)."""
FACTS = ("LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "StatusText")
NAME = "llmbox.service"
SYSTEM_USER = "llmbox"
SYSTEM_DATA = Path("/var/lib/llmbox")
SYSTEM_FOLDER = Path("/etc/systemd/system")

_STOP_SLACK = 15
"""Seconds that systemd waits beyond the drain before it kills."""

# Options that need no privileges: seccomp filters, process flags, a keyring.
_EVERYWHERE = """\
UMask=0077
KeyringMode=private
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources @mount
# Limits of the template worker, threads bound to cores.
SystemCallFilter=prlimit64 setrlimit sched_setaffinity set_mempolicy mbind setpriority
SystemCallErrorNumber=EPERM
"""

# Options of the machine's service manager alone. Under a user's manager those that drop capabilities
# (CapabilityBoundingSet, ProtectClock, ProtectKernelLogs, ProtectKernelModules) stop the start (status 218);
# those that mount something change nothing without user namespaces, which some distributions forbid.
_SYSTEM = """\
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
PrivateTmp=yes
PrivateMounts=yes
RemoveIPC=yes
DevicePolicy=closed
DeviceAllow=char-nvidia rw
DeviceAllow=char-nvidia-frontend rw
DeviceAllow=char-nvidia-uvm rw
DeviceAllow=char-nvidia-caps rw
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    system: bool
    command: Sequence[str]
    """The program with its location flags, without `serve`."""
    drain: float
    """Seconds that open requests may take at the end."""


def unit_text(spec: UnitSpec) -> str:
    service = [
        "Type=notify",
        f"ExecStart={' '.join(map(quote_argument, [*spec.command, 'serve']))}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "Restart=on-failure",
        "RestartSec=2",
        "# Mistakes in settings, a second daemon, refused access: trying again changes nothing.",
        "RestartPreventExitStatus=2 6 9",
        f"TimeoutStopSec={round(spec.drain) + _STOP_SLACK}",
        "KillMode=mixed",
        "LimitNOFILE=65536",
        "OOMPolicy=continue",
    ]
    if spec.system:
        service += [f"User={SYSTEM_USER}", f"Group={SYSTEM_USER}", f"StateDirectory={SYSTEM_DATA.name}"]
        service += ["StateDirectoryMode=0700"]
    hardening = _EVERYWHERE + (_SYSTEM if spec.system else "")
    return "\n".join(
        [
            "# Written by llmbox service install; settings are in config.toml, see llmbox config path.",
            "[Unit]",
            "Description=llmbox, a server of language models",
            "After=network.target",
            "StartLimitIntervalSec=60",
            "StartLimitBurst=5",
            "",
            "[Service]",
            *service,
            hardening,
            "[Install]",
            f"WantedBy={'multi-user.target' if spec.system else 'default.target'}",
            "",
        ]
    )


def quote_argument(word: str) -> str:
    """Quote one argument of ExecStart: specifiers, variables and quotes stand for themselves."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return (
        f'"{escaped}"' if escaped != word or not word or any(c.isspace() or c in "';" for c in word) else word
    )


def unit_file(program: Program, *, system: bool) -> Path:
    if system:
        return SYSTEM_FOLDER / NAME
    config = program.environ.get("XDG_CONFIG_HOME")
    home = expand_home(Path(program.environ.get("HOME") or "~"))
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
        shown = systemctl(program, system, "show", NAME, f"--property={','.join(FACTS)}")
    except CliError as error:
        return {**facts, "detail": error.why}
    data = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    return {
        **facts,
        "enabled": data.get("UnitFileState") or "no",
        "active": data.get("ActiveState", "unknown"),
        "detail": data.get("StatusText") or data.get("SubState", ""),
        "pid": int(data.get("MainPID") or 0) or None,
    }


def remove_unit(program: Program, *, system: bool) -> bool:
    """Remove the unit. Returns True if there was one."""
    file = unit_file(program, system=system)
    if not file.is_file():
        return False
    if BOOTED.is_dir():
        systemctl(program, system, "disable", "--now", NAME)
    try:
        file.unlink()
    except OSError as error:
        raise write_denied(f"cannot remove {file}", error) from error
    if BOOTED.is_dir():
        systemctl(program, system, "daemon-reload")
    return True


def systemctl(program: Program, system: bool, *words: str) -> str:
    scope = [] if system else ["--user"]
    return run_tool(["systemctl", *scope, "--no-pager", *words], program)


def run_tool(command: list[str], program: Program) -> str:
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


def write_denied(what: str, error: OSError) -> CliError:
    denied = isinstance(error, PermissionError)
    return CliError(
        what,
        error.strerror or str(error),
        "with sudo, or --user" if denied else "free some space",
        Exit.DENIED if denied else Exit.FAILED,
    )
