"""`llmbox version`."""

import platform

import click

from llmbox import __version__

from ..lifecycle.program import Command, package_versions
from . import output


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the versions of the main parts.")
def version(*, as_json: bool) -> None:
    """Print the version."""
    if not as_json:
        output.write(f"llmbox {__version__}")
        return
    told = {"version": __version__, "python": platform.python_version(), "packages": package_versions()}
    output.write_json("version", told)
