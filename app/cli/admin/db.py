"""`llmbox db`: maintenance of the request log's file, whether a daemon runs or not."""

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...util import formatting
from .. import output
from ..context import Program, pass_program
from ..root import Command, CommandGroup

BUSY_S = 10.0
"""Seconds to wait for a writer."""


@click.group(cls=CommandGroup)
def db() -> None:
    """Care for the file of the request log and the history of telemetry.

    Serving does not depend on it: damaged or locked, rows are lost and requests answered.
    """


@db.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only set the exit code.")
@pass_program
def check(program: Program, *, as_json: bool, quiet: bool) -> int:
    """Read the whole file and say whether it is sound; exit 8 when it is not."""
    state = _examine(_present(program))
    if as_json:
        output.write_json("db", asdict(state))
    elif not quiet:
        _print(state)
    return Exit.OK if state.sound else Exit.INTEGRITY


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseState:
    path: str
    sound: bool
    schema: str | None
    newest_schema: str | None
    size: int
    rows: dict[str, int]
    """Number of rows by table."""
    findings: list[str]


def _examine(path: Path) -> DatabaseState:
    findings, schema, rows = ["ok"], None, {}
    with _opened(path) as connection:
        try:
            findings = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)")]
            schema = _schema_of(connection)
            rows = {name: _count(connection, name) for name in _tables(connection)}
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            findings = [str(error)]
    sound = findings == ["ok"]
    return DatabaseState(
        path=str(path),
        sound=sound,
        schema=schema,
        newest_schema=_newest_schema(),
        size=size_on_disk(path),
        rows=rows,
        findings=[] if sound else findings,
    )


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
    with _opened(path, write=True) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    output.say(f"{formatting.size(before)} before, {formatting.size(size_on_disk(path))} now.")


@db.command(cls=Command)
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@pass_program
def backup(program: Program, file: Path | None) -> None:
    """Copy it to FILE as it is at this moment, also while the daemon writes. Prints FILE."""
    path = _present(program)
    target = file or path.with_name(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.db")
    if target.exists():
        raise CliError(f"{target} exists", "a backup replaces nothing", "name another FILE", Exit.CONFLICT)
    back_up(path, target)
    output.write(str(target))


def back_up(path: Path, target: Path) -> None:
    """Copy the file through SQLite, so that writers continue. Raises CliError, and then leaves no file."""
    try:
        target.touch(0o600)
        with _opened(path) as source, contextlib.closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
    except (OSError, CliError, sqlite3.Error) as error:
        target.unlink(missing_ok=True)
        why = error.why if isinstance(error, CliError) else str(error)
        raise CliError(f"cannot write {target}", why, "free some space, or name another FILE") from error


@db.command(cls=Command)
@pass_program
def migrate(program: Program) -> None:
    """Bring it to this version's schema, as a whole or not at all. Every start of the daemon does so too."""
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
    with _opened(path) as connection:
        before = _schema_of(connection)
    try:
        open_database(path).dispose()
    except StoreError as error:
        raise CliError("the file stays as it is", str(error), "update llmbox", Exit.CONFLICT) from error
    with _opened(path) as connection:
        after = _schema_of(connection)
    output.say(f"The schema is {after}" + (" already." if before == after else f"; it was {before}."))


def size_on_disk(path: Path) -> int:
    return sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}-wal")) if part.exists())


def _present(program: Program) -> Path:
    path = program.paths.request_db
    if not path.is_file():
        raise CliError(
            f"there is no {path}", "the daemon makes it at its first start", "llmbox up", Exit.NOT_FOUND
        )
    return path


@contextlib.contextmanager
def _opened(path: Path, *, write: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the file. Raises CliError for a file that is locked, full or no database."""
    try:
        mode = "rw" if write else "ro"
        connection = sqlite3.connect(
            f"file:{_escaped(path)}?mode={mode}", uri=True, timeout=BUSY_S, isolation_level=None
        )
        with contextlib.closing(connection):
            yield connection
    except sqlite3.OperationalError as error:
        raise CliError(
            f"cannot use {path}",
            str(error),
            "try again; if it stays locked: llmbox down" if "locked" in str(error) else "llmbox doctor",
        ) from error
    except sqlite3.DatabaseError as error:
        raise CliError(f"{path} is damaged", str(error), "llmbox db check", Exit.INTEGRITY) from error


def _escaped(path: Path) -> str:
    return path.absolute().as_uri().removeprefix("file://")


def _tables(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    return [str(row[0]) for row in connection.execute(query)]


def _count(connection: sqlite3.Connection, table: str) -> int:
    quoted = table.replace('"', '""')
    return int(connection.execute(f'SELECT count(*) FROM "{quoted}"').fetchone()[0])  # noqa: S608 - of sqlite_master


def _schema_of(connection: sqlite3.Connection) -> str | None:
    if "alembic_version" not in _tables(connection):
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def _newest_schema() -> str | None:
    """Return the schema revision that this version writes."""
    from alembic.script import ScriptDirectory

    import llmbox.migrations

    return ScriptDirectory(str(Path(llmbox.migrations.__file__).parent)).get_current_head()
