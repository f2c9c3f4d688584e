"""A click group whose commands are imported when they run, so that `--help` stays quick."""

from importlib import import_module
from typing import Any

import click

from .program import location_options


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
