"""`llmbox completion`."""

import click
from click.shell_completion import get_completion_class

from . import output
from .lazy import Command


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    For bash: llmbox completion bash > ~/.local/share/bash-completion/completions/llmbox
    """
    kind = get_completion_class(shell)
    assert kind is not None
    output.write(kind(context.find_root().command, {}, "llmbox", "_LLMBOX_COMPLETE").source())
