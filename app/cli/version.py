"""`llmbox version`."""

import platform

import click

from llmbox import __version__

from ..lifecycle.program import Command, Program, package_versions, pass_program
from . import output


@click.command(cls=Command)
@click.option("--check", is_flag=True, help="Ask the package index for a newer version.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the versions of the main parts.")
@pass_program
def version(program: Program, *, check: bool, as_json: bool) -> None:
    """Print the version.

    Nothing is asked of the network without --check. It asks the index that pip would ask, and prints the
    command that upgrades this installation; it installs nothing.
    """
    told = {"version": __version__, "python": platform.python_version(), "packages": package_versions()}
    if not check:
        if as_json:
            output.write_json("version", told)
        else:
            output.write(f"llmbox {__version__}")
        return

    from dataclasses import asdict

    from ..diagnostics.updates import check_for_update

    update = check_for_update(program.environ)
    if as_json:
        output.write_json("version", {**told, "update": asdict(update)})
    elif update.is_newer:
        output.write(f"llmbox {update.latest} is available; {update.installed} is installed.")
        output.write(f"Upgrade: {update.command}")
        output.write("Then: llmbox restart")
    else:
        output.write(f"llmbox {update.installed} is the newest version on {update.index}.")
