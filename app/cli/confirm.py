"""Confirmation before a command deletes anything for good."""

import sys

import click

from ..errors import CliError, Exit


def require_consent(question: str, nothing: str, *, yes: bool, as_json: bool) -> None:
    """Ask on a terminal, unless `yes` answers already; refuse where nobody can be asked.

    `nothing` says what was left undone. Raises CliError, click.Abort.
    """
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise CliError(nothing, f"nobody can be asked here: {question}", "say it with --yes", Exit.USAGE)
    click.confirm(question, abort=True, err=True)
