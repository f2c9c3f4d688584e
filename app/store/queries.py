"""The SQL of the request log, as functions of an open database."""

import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from sqlalchemy import Engine, delete, func, insert
from sqlmodel import Session, col, select

from .database import give_back_space, size_on_disk
from .record import RecordFilter, RequestRecord
from .tables import RequestRow

_FIELDS = tuple(f.name for f in fields(RequestRecord))


def add(engine: Engine, records: Sequence[RequestRecord]) -> None:
    """All rows or none."""
    with engine.begin() as connection:
        connection.execute(insert(RequestRow), [asdict(record) for record in records])


def find(engine: Engine, want: RecordFilter) -> list[tuple[int, RequestRecord]]:
    """(sequence number, record), newest first."""
    statement = select(RequestRow).order_by(col(RequestRow.seq).desc()).limit(want.limit)
    if want.model is not None:
        statement = statement.where(RequestRow.model == want.model)
    if want.status is not None:
        statement = statement.where(RequestRow.http_status == want.status)
    if want.errors_only:
        statement = statement.where(RequestRow.error_code != "")
    if want.since is not None:
        statement = statement.where(RequestRow.created >= want.since)
    if want.before_seq is not None:
        statement = statement.where(col(RequestRow.seq) < want.before_seq)
    with Session(engine) as session:
        return [(row.seq or 0, _record(row)) for row in session.exec(statement)]


def get(engine: Engine, request_id: str) -> RequestRecord | None:
    """The newest record of this id (clients may send the same id twice)."""
    statement = select(RequestRow).where(RequestRow.id == request_id).order_by(col(RequestRow.seq).desc())
    with Session(engine) as session:
        row = session.exec(statement).first()
        return None if row is None else _record(row)


def purge(engine: Engine, before: float) -> int:
    """Erase rows created before a Unix time, give the space back, return how many."""
    with engine.begin() as connection:
        count = connection.execute(delete(RequestRow).where(col(RequestRow.created) < before)).rowcount
    give_back_space(engine)
    return count


def trim(engine: Engine, path: Path, retention_s: float, max_bytes: int) -> None:
    """Keep to the retention, and to the byte cap by dropping the oldest tenth."""
    purge(engine, time.time() - retention_s)
    if size_on_disk(path) <= max_bytes:
        return
    seq = col(RequestRow.seq)
    with engine.begin() as connection:
        oldest, newest = connection.execute(select(func.min(seq), func.max(seq))).one()
        if oldest is not None and newest is not None:
            connection.execute(delete(RequestRow).where(seq <= oldest + (newest - oldest) // 10))
    give_back_space(engine)


def _record(row: RequestRow) -> RequestRecord:
    return RequestRecord(**{name: getattr(row, name) for name in _FIELDS})
