"""`llmbox doctor` and `db`: state of this installation, and care of the request log's file."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, pass_program
from ...store.database_file import DatabaseState, back_up, examine, open_file, schema_of, size_on_disk
from ...util import formatting
from .. import output
from ..root import CommandGroup

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
        data = {"ok": not failed, "findings": [asdict(each) for each in findings]}
        output.write_json("doctor", {**data, "bundle": None if bundle is None else str(bundle)})
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
    lines = [formatting.printable(f"{MARKS[finding.status]}  {finding.name}: {finding.message}")]
    return [*lines, formatting.printable(f"          fix: {finding.fix}")] if finding.fix else lines


@click.group(cls=CommandGroup)
def db() -> None:
    """Maintain the database of the request log and the telemetry history.

    Serving does not depend on it: while it is damaged or locked, rows are lost and requests are answered.
    """


@db.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only set the exit code.")
@pass_program
def check(program: Program, *, as_json: bool, quiet: bool) -> int:
    """Check the whole file for damage; exit 8 when it is damaged."""
    state = examine(_present(program))
    if as_json:
        output.write_json("db", asdict(state))
    elif not quiet:
        _print(state)
    return Exit.OK if state.sound else Exit.INTEGRITY


def _print(state: DatabaseState) -> None:
    output.write(f"{state.path}: {'sound' if state.sound else 'DAMAGED'}, {formatting.size(state.size)}")
    for name, count in state.rows.items():
        output.write(f"  {name}: {count} rows")
    for finding in state.findings:
        output.write(f"  {formatting.printable(finding)}")
    if not state.sound:
        output.say("A daemon that starts moves a damaged file aside and begins a new one: llmbox restart")
    elif state.schema != state.newest_schema:
        output.say("Its schema is older than this version's: llmbox db migrate, or start the daemon.")


@db.command(cls=Command)
@pass_program
def vacuum(program: Program) -> None:
    """Give the space of deleted rows back to the disk."""
    path = _present(program)
    before = size_on_disk(path)
    with open_file(path, write=True) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    output.say(f"{formatting.size(before)} before, {formatting.size(size_on_disk(path))} now.")


@db.command(cls=Command)
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@pass_program
def backup(program: Program, file: Path | None) -> None:
    """Copy the database to FILE as it is now, also while the daemon writes. Prints FILE."""
    path = _present(program)
    target = file or path.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.db")
    if target.exists():
        raise CliError(f"{target} exists", "a backup replaces nothing", "name another FILE", Exit.CONFLICT)
    back_up(path, target)
    output.write(str(target))


@db.command(cls=Command)
@pass_program
def migrate(program: Program) -> None:
    """Migrate it to this version's schema in one transaction. Every start of the daemon does so too."""
    from ...store.database import open_database
    from ...store.record import StoreError

    path = _present(program)
    running = find_running(program.paths)
    if running is not None:
        raise CliError(
            "the daemon uses the file",
            f"pid {running.pid} has brought it to the schema of its own version",
            "llmbox restart migrates it, or llmbox down first",
            Exit.CONFLICT,
        )
    with open_file(path) as connection:
        before = schema_of(connection)
    try:
        open_database(path).dispose()
    except StoreError as error:
        raise CliError("the file stays as it is", str(error), "update llmbox", Exit.CONFLICT) from error
    with open_file(path) as connection:
        after = schema_of(connection)
    output.say(f"The schema is {after}" + (" already." if before == after else f"; it was {before}."))


def _present(program: Program) -> Path:
    path = program.paths.request_db
    if not path.is_file():
        raise CliError(
            f"there is no {path}", "the daemon makes it at its first start", "llmbox up", Exit.NOT_FOUND
        )
    return path
