"""Options that `up`, `serve` and `load` share, made from the settings' table: same names, checks and help."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ..config.entries import Scalar
from ..config.loader import OVERRIDES, check_value
from ..config.settings import SettingSpec, schema
from ..models.catalog import check_name

F = TypeVar("F", bound=Callable[..., Any])

DAEMON_KEYS = ("server.host", "server.port", "server.tls", "server.tls_certificate", "server.tls_key")
MODEL_KEYS = tuple(name for name in schema() if name.startswith("model.") and name != OVERRIDES)


class NetworkOption(click.Option):
    """Option of the section `server`."""

    heading = "Network"


class ModelOption(click.Option):
    """Option of the section `model`."""

    heading = "Model"


OPTION_KINDS: dict[str, type[click.Option]] = {"server": NetworkOption, "model": ModelOption}
"""Kinds by section. `Command` prints those of a heading together, after the command's own options."""


def daemon_options(function: F) -> F:
    return _add(function, DAEMON_KEYS)


def setting_options(*names: str) -> Callable[[F], F]:
    """Add the options of the named settings to a command."""
    return lambda function: _add(function, names)


def model_options(function: F) -> F:
    function = click.option("--alias", metavar="NAME", help="Also serve the model under this name.")(function)
    return _add(function, MODEL_KEYS)


def mmproj_option(function: F) -> F:
    return click.option(
        "--mmproj",
        metavar="FILE",
        help="Projector file of a GGUF model, for images; none: no projector. Default: the one beside the "
        "model.",
    )(function)


def read_flags(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the settings that were on the command line, checked."""
    flags: dict[str, Scalar] = {}
    for name in (*DAEMON_KEYS, *MODEL_KEYS):
        value = values.get(parameter(name))
        if value is not None:
            flags[name] = check_value(schema()[name], value, flag(name), from_text=True)
    return flags


def checked_alias(alias: str | None) -> str | None:
    return None if alias is None else check_name(alias)


def as_arguments(flags: Mapping[str, Scalar]) -> list[str]:
    """Format settings as command-line arguments."""
    arguments: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            arguments.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        else:
            arguments += [flag(name), "auto" if value is None else str(value)]
    return arguments


def flag(name: str) -> str:
    return "--" + name.partition(".")[2].replace("_", "-")


def parameter(name: str) -> str:
    return name.partition(".")[2]


def _add(function: F, names: tuple[str, ...]) -> F:
    for name in reversed(names):
        function = _option(schema()[name])(function)
    return function


def _option(row: SettingSpec) -> Callable[[F], F]:
    if row.kind is bool:
        off = flag(row.name).replace("--", "--no-", 1)
        names = (f"{flag(row.name)}/{off}", parameter(row.name))
        return click.option(
            *names, default=None, help=row.doc, cls=OPTION_KINDS.get(row.section, click.Option)
        )
    kind = click.Choice(row.choices) if row.choices else None
    metavar = None if row.choices else {int: "N", float: "X", str: "TEXT"}[row.kind]
    names = (flag(row.name), parameter(row.name))
    return click.option(
        *names, type=kind, metavar=metavar, help=row.doc, cls=OPTION_KINDS.get(row.section, click.Option)
    )
