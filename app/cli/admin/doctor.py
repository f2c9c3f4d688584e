"""`llmbox doctor` and `llmbox version`: the state of this installation. Neither changes anything."""

import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmbox import __version__

from ...errors import Exit
from ...lifecycle.program import Command, Program, package_versions, pass_program
from ...util import formatting
from .. import output

if TYPE_CHECKING:
    from ...diagnostics.checks import Finding

MARKS = {"ok": "ok    ", "note": "note  ", "failed": "FAILED"}


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Only findings that need attention.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write a zip for support: versions, settings, log; no keys, prompts or answers.",
)
@pass_program
def doctor(program: Program, *, as_json: bool, quiet: bool, bundle: Path | None) -> int:
    """Check this machine; every finding comes with a fix. Exit 10 when something is broken."""
    from ...diagnostics.checks import run_checks

    findings = run_checks(program)
    failed = [finding for finding in findings if finding.status == "failed"]
    if bundle is not None:
        from ...diagnostics.bundle import write_bundle

        parts = write_bundle(program, findings, bundle)
        output.say(f"{bundle} holds {', '.join(parts)}. Review it before you share it.")
    if as_json:
        told = {"ok": not failed, "findings": [asdict(each) for each in findings]}
        output.write_json("doctor", {**told, "bundle": None if bundle is None else str(bundle)})
        return Exit.DOCTOR if failed else Exit.OK
    output.write_lines(
        [line for each in findings if not quiet or each.status != "ok" for line in _lines(each)]
    )
    if failed:
        output.say(f"{len(failed)} of {len(findings)} checks failed.")
        return Exit.DOCTOR
    output.say(f"All {len(findings)} checks passed.")
    return Exit.OK


def _lines(finding: "Finding") -> list[str]:
    told = [formatting.printable(f"{MARKS[finding.status]}  {finding.name}: {finding.message}")]
    return [*told, formatting.printable(f"          fix: {finding.fix}")] if finding.fix else told


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

    from ...diagnostics.updates import check_for_update

    update = check_for_update(program.environ)
    if as_json:
        output.write_json("version", {**told, "update": asdict(update)})
    elif update.is_newer:
        output.write(f"llmbox {update.latest} is available; {update.installed} is installed.")
        output.write(f"Upgrade: {update.command}")
        output.write("Then: llmbox restart")
    else:
        output.write(f"llmbox {update.installed} is the newest version on {update.index}.")
