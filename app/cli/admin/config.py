"""`llmbox config` and `llmbox completion`."""

import os
import shlex
import subprocess

import click
from click.shell_completion import get_completion_class

from ...config.entries import Scalar
from ...config.loader import LoadedSettings, SettingOrigin, check_value, unknown_key
from ...config.settings import SettingSpec, schema
from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util.formatting import format_setting, printable
from .. import output
from ..root import CommandGroup


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell's completion script, for a file that the shell reads.

    \b
    bash  llmbox completion bash > ~/.local/share/bash-completion/completions/llmbox
    zsh   llmbox completion zsh > ~/.zfunc/_llmbox, where ~/.zfunc is in $fpath before compinit
    fish  llmbox completion fish > ~/.config/fish/completions/llmbox.fish
    """  # noqa: D301 - click's mark of lines to leave as they are
    kind = get_completion_class(shell)
    assert kind is not None
    output.write(kind(context.find_root().command, {}, "llmbox", "_LLMBOX_COMPLETE").source())


@click.group(cls=CommandGroup)
def config() -> None:
    """Show and change settings.

    Settings are in one TOML file. Precedence: flag, LLMBOX_SECTION_KEY variable, user file, system file,
    default.
    """


@config.command()
@click.argument("section", required=False)
@click.option(
    "--effective", is_flag=True, help="Show the values of the running daemon, including its start flags."
)
@click.option("--origin", is_flag=True, help="Show where each value comes from.")
@json_option
@pass_program
def show(program: Program, section: str | None, *, effective: bool, origin: bool, as_json: bool) -> None:
    """Show all settings, or those of one SECTION."""
    rows = _effective(program) if effective else _rows(program.settings())
    if section is not None:
        rows = [row for row in rows if row[0].section == section]
        if not rows:
            raise unknown_key(section)
    if as_json:
        data = {
            row.name: {"value": value, "origin": where.source, "place": where.place, "default": row.default}
            for row, value, where in rows
        }
        output.write_json("config", {"settings": data})
    elif origin:
        table = [(row.name, format_setting(value), str(where), row.doc) for row, value, where in rows]
        output.table(("KEY", "VALUE", "ORIGIN", "MEANING"), table)
    else:
        output.table(
            ("KEY", "VALUE", "MEANING"),
            [(row.name, format_setting(value), row.doc) for row, value, _ in rows],
        )


@config.command()
@click.argument("key")
@pass_program
def get(program: Program, key: str) -> None:
    """Print one value."""
    output.write(format_setting(program.settings().settings.get(_key(key).name)))


@config.command("set")
@click.argument("key")
@click.argument("value")
@pass_program
def set_(program: Program, key: str, value: str) -> None:
    """Write one value to the user's file; comments stay. Lists are separated by commas."""
    from ...config.loader import set_value

    row = _key(key)
    checked = check_value(row, value, key, from_text=True)
    set_value(program.paths.config_file, row, checked)
    output.say(f"{row.name} = {format_setting(checked)} in {program.paths.config_file}")
    loaded = program.settings()
    if loaded.origins[row.name].source in {"env", "flag"}:
        output.say(f"Note: {loaded.origins[row.name]} overrides the file.")
    if (running := find_running(program.paths)) is not None:
        output.say(_how_to_apply(program, row, running.pid))


def _how_to_apply(program: Program, row: SettingSpec, pid: int) -> str:
    """Describe how the running daemon takes a new value of its file. A restart keeps the daemon's flags."""
    try:
        kept = program.client.get("/admin/api/config")["settings"].get(row.name, {})
    except CliError:  # it starts, stops or hangs
        kept = {}
    if kept.get("origin") in {"flag", "env"}:
        place = printable(kept["place"])
        return f"The daemon was started with {place}, which overrides the file: llmbox down, then llmbox up"
    return f"Apply it: kill -HUP {pid}" if row.live else "Apply it: llmbox restart"


@config.command()
@pass_program
def edit(program: Program) -> None:
    """Open the file in $EDITOR, then check it."""
    from ...config.loader import template, write_atomic

    path = program.paths.config_file
    if not path.exists():
        write_atomic(path, template())
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        subprocess.run([*shlex.split(editor), str(path)], check=True)  # noqa: S603 - the user's own editor
    except (OSError, subprocess.CalledProcessError) as error:
        raise CliError(
            f"the editor {editor!r} failed", str(error), "set EDITOR, or edit the file yourself"
        ) from error
    program.settings()


@config.command()
@pass_program
def path(program: Program) -> None:
    """Print the path of the user's file."""
    output.write(str(program.paths.config_file))


@config.command()
@pass_program
def check(program: Program) -> None:
    """Check files and environment; exit 2 when something is wrong."""
    program.settings()
    output.say("The configuration is valid.")


def _key(name: str) -> SettingSpec:
    row = schema().get(name)
    if row is None:
        raise unknown_key(name)
    return row


def _rows(loaded: LoadedSettings) -> list[tuple[SettingSpec, Scalar, SettingOrigin]]:
    return loaded.table()


def _effective(program: Program) -> list[tuple[SettingSpec, Scalar, SettingOrigin]]:
    answer = program.client.get("/admin/api/config")["settings"]
    rows = []
    for name, row in schema().items():
        item = answer.get(name)
        if item is None:
            raise CliError(
                "the daemon has another version", f"it has no key {name}", "llmbox restart", Exit.CONFLICT
            )
        value = tuple(item["value"]) if isinstance(item["value"], list) else item["value"]
        rows.append((row, value, SettingOrigin(item["origin"], item["place"])))
    return rows
