"""`llmbox doctor`: looks at the whole box without changing it; every finding comes with its fix."""

from dataclasses import asdict

import click

from ..errors import Exit
from . import output
from .lazy import Command
from .program import Program, pass_program

MARKS = {"ok": "ok    ", "note": "note  ", "failed": "FAILED"}


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Only what needs attention.")
@pass_program
def doctor(program: Program, *, as_json: bool, quiet: bool) -> int:
    """Check this box; every finding comes with its fix. Exit 10 when something is broken."""
    from .checks import run_checks

    findings = run_checks(program)
    failed = [finding for finding in findings if finding.status == "failed"]
    if as_json:
        output.write_json("doctor", {"ok": not failed, "findings": [asdict(each) for each in findings]})
        return Exit.DOCTOR if failed else Exit.OK
    for finding in findings:
        if quiet and finding.status == "ok":
            continue
        output.write(output.printable(f"{MARKS[finding.status]}  {finding.name}: {finding.message}"))
        if finding.fix:
            output.write(output.printable(f"          fix: {finding.fix}"))
    if failed:
        output.say(f"{len(failed)} of {len(findings)} checks failed.")
        return Exit.DOCTOR
    output.say(f"All {len(findings)} checks passed.")
    return Exit.OK
