"""Schema of all settings: one table, made from the sections in `settings.py`.

The TOML file, `LLMBOX_SECTION_KEY` variables, command-line flags, `llmbox config` and the docs use it.
"""

from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from .entries import EntryCheck, Scalar
from .model_settings import CacheSettings, MemorySettings, ModelSettings
from .settings import (
    HubSettings,
    LimitSettings,
    LogSettings,
    RequestSettings,
    ServerSettings,
    TelemetrySettings,
    UsageSettings,
)

LOCAL = frozenset({"server.mcp_commands", "telemetry.otlp_endpoint", "telemetry.otlp_headers_file"})
"""Keys that the panel shows and cannot change: only who may run commands on this machine can."""


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """One row of the table. `name` is `section.key`; `kind` is the type of the value."""

    name: str
    kind: type
    optional: bool
    choices: tuple[str, ...]
    default: Scalar
    doc: str
    low: float | None
    high: float | None
    each: EntryCheck | None
    live: bool

    @property
    def is_local(self) -> bool:
        return self.name in LOCAL

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def variable(self) -> str:
        return "LLMBOX_" + self.name.replace(".", "_").upper()


SECTIONS: dict[str, type] = {
    "server": ServerSettings,
    "limits": LimitSettings,
    "model": ModelSettings,
    "memory": MemorySettings,
    "cache": CacheSettings,
    "hub": HubSettings,
    "log": LogSettings,
    "requests": RequestSettings,
    "usage": UsageSettings,
    "telemetry": TelemetrySettings,
}


@cache
def schema() -> dict[str, SettingSpec]:
    """All keys by name, in the order of their definition."""
    keys: dict[str, SettingSpec] = {}
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls)
        for item in fields(cls):
            name = f"{section}.{item.name}"
            kind, optional, choices = _shape(hints[item.name])
            meta = item.metadata
            keys[name] = SettingSpec(
                name=name,
                kind=kind,
                optional=optional,
                choices=choices,
                default=cast("Scalar", item.default),
                doc=meta["doc"],
                low=meta["low"],
                high=meta["high"],
                each=meta["each"],
                live=meta["live"],
            )
    return keys


def _shape(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    optional = False
    if get_origin(hint) is UnionType:
        optional = True
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is Literal:
        return str, optional, get_args(hint)
    if get_origin(hint) is tuple:
        return tuple, optional, ()
    return hint, optional, ()
