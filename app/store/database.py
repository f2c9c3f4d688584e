"""Database of the request log: its SQLite file, opened and migrated to the newest schema, and its tables.

Raises `StoreError` for a file written by a newer llmbox. A damaged file is moved aside, not deleted: it is
erased when its contents would have expired. A changed table needs a migration in `migrations/versions`.
"""

import logging
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Column, ColumnElement, Engine, ForeignKey, Index, Integer, create_engine, delete, event
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool
from sqlmodel import Field, SQLModel

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


class RequestRow(SQLModel, table=True):
    """`RequestRecord` with a sequence number, which gives a stable order for paging."""

    __tablename__ = "request"

    seq: int | None = Field(default=None, primary_key=True)
    id: str = Field(index=True)
    created: float = Field(index=True)
    model: str
    endpoint: str
    http_status: int
    key: str
    stream: bool
    finish_reasons: str
    error_code: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    n: int
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    resumes: int
    seed: int | None = None
    params: str
    client: str
    looked_up_tokens: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    prefix_end: str = Field(default="", sa_column_kwargs={"server_default": ""})
    disk_tokens: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    host_tokens: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    draft_tokens: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    accepted_tokens: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    output_hash: str = Field(default="", sa_column_kwargs={"server_default": ""})
    fingerprint: str = Field(default="", sa_column_kwargs={"server_default": ""})
    tier: str = Field(default="", sa_column_kwargs={"server_default": ""})
    content: str = Field(default="", sa_column_kwargs={"server_default": ""})
    trace_id: str = Field(default="", sa_column_kwargs={"server_default": ""})


class ContentRow(SQLModel, table=True):
    """`Content` of a request. Deleted with its request."""

    __tablename__ = "content"

    seq: int = Field(
        sa_column=Column(Integer, ForeignKey("request.seq", ondelete="CASCADE"), primary_key=True)
    )
    created: float = Field(index=True)
    owner: str
    body: str
    body_bytes: int
    prompts: str
    """JSON list of texts, as is `outputs`."""
    prompt_bytes: int
    outputs: str
    output_bytes: int


class TimesRow(SQLModel, table=True):
    """`SequenceRecord` of a request's sequence. Deleted with its request."""

    __tablename__ = "sequence_times"

    seq: int = Field(
        sa_column=Column(Integer, ForeignKey("request.seq", ondelete="CASCADE"), primary_key=True)
    )
    number: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    """Place by the order of ends."""
    data: bytes


class TelemetryRow(SQLModel, table=True):
    """Means over the `step` seconds from `time` (Unix) on. `series` is a JSON object, name to number."""

    __tablename__ = "telemetry"

    step: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    time: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    series: str


class MarkRow(SQLModel, table=True):
    """Annotation of the charts: a moment that explains a change."""

    __tablename__ = "mark"

    seq: int | None = Field(default=None, primary_key=True)
    time: float = Field(index=True)
    """Unix seconds."""
    kind: str
    model: str
    text: str


class StoredRow(SQLModel, table=True):
    """`StoredAnswer`: kept until its owner deletes it or it expires."""

    __tablename__ = "stored"
    __table_args__ = (Index("ix_stored_place", "kind", "owner", "id", unique=True),)

    seq: int | None = Field(default=None, primary_key=True)
    kind: str
    owner: str
    id: str
    created: float = Field(index=True)
    model: str
    previous: str
    details: str
    """JSON object of texts: OpenAI's `metadata`, a name that SQLModel reserves."""
    input: str
    """JSON list."""
    answer: str
    """JSON object."""
    size: int
    """Bytes of the texts."""


class BatchRow(SQLModel, table=True):
    """`Batch`: kept until its owner deletes it or it expires."""

    __tablename__ = "batch"
    __table_args__ = (Index("ix_batch_place", "kind", "owner", "id", unique=True),)

    seq: int | None = Field(default=None, primary_key=True)
    kind: str
    owner: str
    id: str
    created: float = Field(index=True)
    expires: float
    ended: float | None = None
    cancelled: float | None = None
    total: int
    details: str
    """JSON object."""


class BatchItemRow(SQLModel, table=True):
    """`BatchItem` and its answer. Deleted with its batch."""

    __tablename__ = "batch_item"
    __table_args__ = (Index("ix_batch_item_status", "batch", "status"),)

    seq: int | None = Field(default=None, primary_key=True)
    batch: int = Field(sa_column=Column(Integer, ForeignKey("batch.seq", ondelete="CASCADE"), nullable=False))
    custom_id: str
    path: str
    status: str
    body: str
    """JSON; empty once there is an answer."""
    http_status: int
    request_id: str
    answer: str
    """JSON."""
    size: int
    """Bytes of body and answer."""


class ConversationRow(SQLModel, table=True):
    """`Conversation` of the panel's chat: kept until its owner deletes it."""

    __tablename__ = "panel_conversation"
    __table_args__ = (Index("ix_panel_conversation_place", "owner", "id", unique=True),)

    seq: int | None = Field(default=None, primary_key=True)
    owner: str
    id: str
    title: str
    model: str
    created: float
    updated: float
    body: str
    """JSON object of `ConversationBody`."""


class PanelItemRow(SQLModel, table=True):
    """Preset or MCP server of the panel's chat: kept until its owner deletes it."""

    __tablename__ = "panel_item"
    __table_args__ = (Index("ix_panel_item_place", "owner", "kind", "name", unique=True),)

    seq: int | None = Field(default=None, primary_key=True)
    owner: str
    kind: str
    name: str
    body: str
    """JSON object of the kind's struct."""


def delete_rows(engine: Engine, table: type[SQLModel], which: ColumnElement[bool]) -> bool:
    """Delete rows, with the copies in the write-ahead log. Returns False if there are none."""
    with engine.begin() as connection:
        found = connection.execute(delete(table).where(which)).rowcount > 0
    if found:
        give_back_space(engine)
    return found
