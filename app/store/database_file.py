"""Request log as a plain SQLite file, without SQLAlchemy: state, copies, access, also beside a daemon."""

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

import llmbox.migrations
from llmbox.engine.ipc.sequence_times import decode_schedule

from ..errors import CliError, Exit
from .conversations import ChatToolServer, without_values
from .record import decode_sequence

BUSY_S = 10.0
"""Seconds to wait for a writer."""


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


def examine(path: Path) -> DatabaseState:
    findings, schema, rows = ["ok"], None, {}
    with open_file(path) as connection:
        try:
            findings = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)")]
            schema = schema_of(connection)
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
        newest_schema=newest_schema(),
        size=size_on_disk(path),
        rows=rows,
        findings=[] if sound else findings,
    )


def read_schedules(
    path: Path, since: float, until: float, model: str | None
) -> tuple[list[bytes], dict[int, list[str]]]:
    """Read the encoded `ScheduleRecord`s of requests that came in this time (Unix seconds), and the models of
    each engine by its `run`. `model`: engines that answered for it, with all their sequences.
    """
    statement = (
        "SELECT request.model, sequence_times.data FROM sequence_times JOIN request USING (seq)"
        " WHERE request.created BETWEEN ? AND ?"
    )
    found, models = list[tuple[int, bytes]](), dict[int, set[str]]()
    with open_file(path) as connection:
        for name, data in connection.execute(statement, (since, until)):
            times = decode_sequence(data)
            schedule = None if times is None else decode_schedule(times.schedule)
            if times is not None and schedule is not None:
                found.append((schedule.run, times.schedule))
                models.setdefault(schedule.run, set()).add(name)
    kept = {run: sorted(names) for run, names in models.items() if model is None or model in names}
    return [data for run, data in found if run in kept], kept


def back_up(path: Path, target: Path) -> None:
    """Copy the file through SQLite, so that writers continue. Raises CliError, and then leaves no file.

    The copy has no secrets of MCP servers, also where an older version has left them in the file.
    """
    try:
        target.touch(0o600)
        with open_file(path) as source, contextlib.closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
            _blank_secrets(copy)
    except (OSError, CliError, sqlite3.Error, msgspec.MsgspecError) as error:
        target.unlink(missing_ok=True)
        why = error.why if isinstance(error, CliError) else str(error)
        raise CliError(f"cannot write {target}", why, "free some space, or name another FILE") from error


def _blank_secrets(copy: sqlite3.Connection) -> None:
    if "panel_item" not in _tables(copy):
        return
    copy.execute("PRAGMA secure_delete=ON")
    servers = copy.execute("SELECT seq, body FROM panel_item WHERE kind = 'mcp_server'").fetchall()
    for number, body in servers:
        spec = without_values(msgspec.json.decode(body, type=ChatToolServer))
        changed = msgspec.json.encode(spec).decode()
        copy.execute("UPDATE panel_item SET body = ? WHERE seq = ?", (changed, number))
    copy.commit()


def size_on_disk(path: Path) -> int:
    """Bytes of the database with its write-ahead log."""
    return sum(p.stat().st_size for p in (path, path.with_name(path.name + "-wal")) if p.exists())


@contextlib.contextmanager
def open_file(path: Path, *, write: bool = False) -> Iterator[sqlite3.Connection]:
    """Open the file. Raises CliError for a file that is locked, full or no database."""
    try:
        mode = "rw" if write else "ro"
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_S, isolation_level=None
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


def _tables(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    return [str(row[0]) for row in connection.execute(query)]


def _count(connection: sqlite3.Connection, table: str) -> int:
    quoted = table.replace('"', '""')
    return int(connection.execute(f'SELECT count(*) FROM "{quoted}"').fetchone()[0])  # noqa: S608 - of sqlite_master


def schema_of(connection: sqlite3.Connection) -> str | None:
    if "alembic_version" not in _tables(connection):
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def newest_schema() -> str:
    """Return the schema revision that this version writes: the number of the last migration."""
    folder = Path(llmbox.migrations.__file__).parent / "versions"
    return max(path.name[1:4] for path in folder.glob("m[0-9][0-9][0-9]_*.py"))


def is_current(path: Path) -> bool:
    """Return True if the file has the newest schema; False also where it cannot be read."""
    try:
        with open_file(path) as connection:
            return schema_of(connection) == newest_schema()
    except CliError:
        return False
