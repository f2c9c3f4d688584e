"""Entry point of the `llmbox` command. Turns every expected error into lines on stderr and an exit code."""

import os
import sys
from collections.abc import Sequence

import click

from .cli import output
from .cli.root import COMMANDS, LazyGroup, StdoutClosed
from .errors import CliError, Exit
from .lifecycle.program import Program

INTERRUPTED = 130
"""Exit code that shells report for a process that SIGINT ended."""


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="llmbox", prog_name="llmbox", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve language models on one box.

    Start with `llmbox up`, then point any OpenAI client at the printed URL.
    """
    if context.invoked_subcommand is None:
        from .cli.server.lifecycle import print_overview  # noqa: PLC0415 - keeps `llmbox --help` fast

        print_overview(context.ensure_object(Program))


def main(arguments: Sequence[str] | None = None, program: Program | None = None) -> None:
    """Run the command and exit the process with its exit code."""
    sys.exit(run(arguments, program or Program()))


def run(arguments: Sequence[str] | None, program: Program) -> int:
    """Run the command. Returns its exit code."""
    os.umask(0o077)
    try:
        code = cli.main(
            None if arguments is None else list(arguments),
            prog_name="llmbox",
            standalone_mode=False,
            obj=program,
        )
        sys.stdout.flush()
    except CliError as error:
        output.print_error(error)
        return error.exit
    except click.UsageError as error:
        error.show()
        return Exit.USAGE
    except click.ClickException as error:
        error.show()
        return Exit.FAILED
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except (StdoutClosed, BrokenPipeError):
        # Point stdout elsewhere, or Python complains at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    return code if isinstance(code, int) else Exit.OK
