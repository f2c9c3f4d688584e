"""`llmbox doctor`: checks the whole box without changing it; every finding comes with its fix."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import Exit
from ...lifecycle.program import Command, Program, pass_program
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
