"""SQLite file of the request log: opening it, and migrating it to the newest schema.

Raises `StoreError` for a file written by a newer llmbox. A damaged file is moved aside, not deleted: it is
erased when its contents would have expired.
"""

import logging
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool

import llmbox.migrations

from .database_file import is_current
from .record import StoreError

log = logging.getLogger(__name__)

_BUSY_MS = 5000
_MIGRATING = threading.Lock()
"""Held while migrations run: their `alembic.op` is one for the process, whatever the database."""
SIDES = ("", "-wal", "-shm")
"""Suffixes that SQLite adds to the database's name for its files."""


def open_database(path: Path) -> Engine:
    """Open `path` in WAL mode and migrate it to the newest schema, completely or not at all."""
    try:
        return _open_migrated(path)
    except DatabaseError as error:
        if not is_damage(error):
            raise
        set_aside(path)
        return _open_migrated(path)


def is_damage(error: Exception) -> bool:
    return "malformed" in str(error) or "not a database" in str(error)


def set_aside(path: Path) -> None:
    """Move the file aside with its write-ahead log, which must not be applied to the new file. Earlier files
    stay.
    """
    second = int(time.time())
    while list(path.parent.glob(f"{path.name}.damaged-{second}*")):
        second += 1
    aside = f"{path.name}.damaged-{second}"
    for end in SIDES:
        if (part := path.with_name(path.name + end)).exists():
            part.rename(path.with_name(aside + end))
    log.warning("the request log %s is damaged: moved to %s, a new one was started", path.name, aside)


def erase_damaged(path: Path, before: float) -> None:
    """Delete damaged files that were set aside before a Unix time: everything in them is older."""
    for file in path.parent.glob(f"{path.name}.damaged-*"):
        moved = file.name.rpartition(".damaged-")[2].partition("-")[0]
        if moved.isdecimal() and int(moved) <= before:
            file.unlink(missing_ok=True)


def _open_migrated(path: Path) -> Engine:
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=NullPool,
        connect_args={"timeout": _BUSY_MS / 1000},
        hide_parameters=True,  # values of a statement must not reach the log with its error
    )
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    if not is_current(path):
        upgrade(engine)
    path.chmod(0o600)
    return engine


def _on_connect(connection: sqlite3.Connection, _: Any) -> None:
    # Python's sqlite3 commits before DDL unless transactions are left to us by this setting: without it
    # a migration killed halfway would leave half a schema.
    connection.isolation_level = None
    for pragma in (
        "auto_vacuum=INCREMENTAL",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "secure_delete=ON",  # purged rows are overwritten, not just unlinked
        "journal_size_limit=4194304",
        "foreign_keys=ON",  # content goes when its row goes
    ):
        connection.execute(f"PRAGMA {pragma}")


def upgrade(engine: Engine, target: str = "head") -> None:
    """Run migrations up to `target` in one transaction."""
    # Alembic takes 0.2 s of CPU to import, which a start with a file of this schema need not pay.
    from alembic.config import Config  # noqa: PLC0415
    from alembic.migration import MigrationContext  # noqa: PLC0415
    from alembic.runtime.environment import EnvironmentContext  # noqa: PLC0415
    from alembic.script import ScriptDirectory  # noqa: PLC0415

    scripts = ScriptDirectory(str(Path(llmbox.migrations.__file__).parent))

    def steps(revision: Any, _: Any) -> Any:
        return scripts._upgrade_revs(target, revision)  # noqa: SLF001 - as alembic.command does

    with _MIGRATING, engine.begin() as connection:
        known = {script.revision for script in scripts.walk_revisions()}
        _refuse_newer(MigrationContext.configure(connection).get_current_revision(), known)
        environment = EnvironmentContext(Config(), scripts)
        environment.configure(connection=connection, fn=steps, transactional_ddl=False)
        environment.run_migrations()


def _refuse_newer(current: str | None, known: set[str]) -> None:
    if current is not None and current not in known:
        raise StoreError(
            f"the request log was written by a newer llmbox (schema {current}); "
            "update llmbox, or move the file away to begin a new log"
        )


def empty_size(engine: Engine) -> int:
    """Return the bytes that the tables and indexes take without a row: a page each."""
    with engine.connect() as connection:
        trees: int = connection.exec_driver_sql(
            "SELECT count(*) FROM sqlite_master WHERE rootpage > 0"
        ).scalar_one()
        page: int = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
    return page * (trees + 1)


def give_back_space(engine: Engine) -> bool:
    """Return freed pages to the file system and empty the write-ahead log, which holds deleted rows.

    Returns False while a reader prevents the latter.
    """
    connection = engine.raw_connection()
    try:
        # This pragma gives back one page a row, and has no columns: `execute` would take one row, whatever is
        # fetched. A script is run to its end.
        connection.cursor().executescript("PRAGMA incremental_vacuum")
        ((busy, *_),) = connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return not busy
    finally:
        connection.close()
