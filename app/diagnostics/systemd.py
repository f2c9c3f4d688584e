"""Systemd unit of the daemon, for one user or for the machine.

Settings are never in it: they stay in the TOML file that every command reads, and change without a reload of
units. Its hardening was chosen with `systemd-analyze security`. Options that would stop the work are left
out: GPU drivers and compiled kernels map memory that is both writable and executable, so there is no
MemoryDenyWriteExecute, and clients are on the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "llmbox.service"
SYSTEM_USER = "llmbox"
SYSTEM_DATA = Path("/var/lib/llmbox")
SYSTEM_FOLDER = Path("/etc/systemd/system")

_STOP_SLACK = 15
"""Seconds more than the drain that systemd waits before it kills."""

# Options that need no privileges: these are seccomp filters and process flags.
_EVERYWHERE = """\
UMask=0077
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

# Options of the machine's service manager alone: namespaces, devices and capabilities are its to give.
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
