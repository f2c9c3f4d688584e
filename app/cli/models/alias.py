"""`llmbox alias`: names and parameter variants over one load."""

import click

from ...lifecycle.program import Command, Program, pass_program
from ...models.adapters import set_alias
from .. import output
from ..root import CommandGroup


@click.group(cls=CommandGroup)
def alias() -> None:
    """Names and parameter variants of models."""


@alias.command("set", cls=Command)
@click.argument("name")
@click.argument("ref")
@click.argument("parameters", nargs=-1, metavar="[K=V]...")
@pass_program
def set_(program: Program, *, name: str, ref: str, parameters: tuple[str, ...]) -> None:
    """Make NAME an alias of the model REF.

    Parameters apply where a request does not set them: temperature, top_p, top_k, min_p, repetition_penalty,
    and system, a system prompt. ctx bounds the context. All aliases of a model share one load.
    """
    found = set_alias(
        program.registry, program.environ, name, ref, parameters, program.in_memory()
    ).parameters
    output.say(f"{name} is {ref}" + (f" with {_format_parameters(found)}" if found else "") + ".")


@alias.command("ls", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Names only.")
@pass_program
def ls(program: Program, *, as_json: bool, quiet: bool) -> None:
    """List the aliases."""
    aliases = program.names.aliases
    if as_json:
        rows = [
            {"name": name, "model": each.model, "parameters": dict(each.parameters)}
            for name, each in aliases.items()
        ]
        output.write_json("aliases", {"aliases": rows})
    elif quiet:
        for name in aliases:
            output.write(name)
    elif aliases:
        rows_ = [
            (name, each.model, _format_parameters(each.parameters)) for name, each in sorted(aliases.items())
        ]
        output.table(("NAME", "MODEL", "PARAMETERS"), rows_)
    else:
        output.say("No aliases. Set one: llmbox alias set NAME MODEL")


@alias.command("rm", cls=Command)
@click.argument("name")
@pass_program
def rm(program: Program, *, name: str) -> None:
    """Remove an alias. Its model stays."""
    program.registry.remove_alias(name)
    output.say(f"{name} is no longer an alias.")


def _format_parameters(parameters: object) -> str:
    assert isinstance(parameters, dict)
    return " ".join(f"{key}={str(value)[:40]}" for key, value in parameters.items())
