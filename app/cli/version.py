"""`llmbox version`."""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

from llmbox import __version__

from . import output
from .root import Command

PARTS = ("torch", "litestar", "uvicorn", "tokenizers", "huggingface-hub")


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the versions of the main parts.")
def version(*, as_json: bool) -> None:
    """Print the version."""
    if not as_json:
        output.write(f"llmbox {__version__}")
        return
    told = {"version": __version__, "python": platform.python_version(), "packages": package_versions()}
    output.write_json("version", told)


def package_versions() -> dict[str, str | None]:
    return {name: _installed(name) for name in PARTS}


def _installed(name: str) -> str | None:
    try:
        return installed(name)
    except PackageNotFoundError:
        return None
