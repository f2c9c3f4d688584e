"""A click group whose commands are imported when they run, so that `--help` stays quick."""

from importlib import import_module
from typing import Any, Final

import click

from ..suggest import nearest
from .program import location_options

SYNONYMS: Final = {
    "list": ("ls", "show"),
    "models": ("ls",),
    "get": ("pull", "show"),
    "download": ("pull",),
    "install": ("pull",),
    "delete": ("rm",),
    "remove": ("rm",),
    "start": ("up",),
    "stop": ("down",),
    "chat": ("run",),
    "ask": ("run",),
    "info": ("show",),
    "log": ("logs",),
    "keys": ("key",),
    "settings": ("config",),
    "create": ("add", "set"),
    "new": ("add", "set"),
    "revoke": ("rm",),
    "monitor": ("top",),
    "dashboard": ("top",),
}
"""Words of other programs, and what is meant by them here: the first that the group has."""


def refuse_unknown(group: click.Group, ctx: click.Context, args: list[str]) -> None:
    """Raises UsageError with the nearest command, if the first word is none of the group's."""
    word = args[0]
    if ctx.resilient_parsing or word.startswith("-") or group.get_command(ctx, word) is not None:
        return
    names = group.list_commands(ctx)
    meant = next((name for name in SYNONYMS.get(word.lower(), ()) if name in names), None)
    meant = meant or nearest(word, names)
    hint = f" Did you mean '{meant}'?" if meant else ""
    raise click.UsageError(f"No such command '{word}'.{hint}", ctx)


class Command(click.Command):
    """A command that also takes `--data-dir` and `--config`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += location_options()


class Group(click.Group):
    """A group of commands inside one, such as `config`."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += location_options()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        refuse_unknown(self, ctx, args)
        return super().resolve_command(ctx, args)


class ReaderLeft(Exception):  # noqa: N818 - nothing went wrong
    """Whoever read our stdout has closed it (`llmbox logs | head`)."""


class LazyGroup(click.Group):
    """`commands` maps a name to (`module:attribute`, help line); several names may share one target."""

    def __init__(self, *args: Any, table: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table
        self.params += location_options(from_environment=True)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # click would end with 1
            raise ReaderLeft from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        refuse_unknown(self, ctx, args)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in self.table:
            return None
        target, line = self.table[cmd_name]
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(import_module(module, "llmbox.app.cli"), attribute)
        command.short_help = line
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.table.items()])
