"""SQL of batches, as functions of an open database."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, Engine, and_, func, insert, select
from sqlalchemy import delete as delete_from
from sqlalchemy import update as change
from sqlmodel import Session, col

from ..batches import Batch, BatchCounts, BatchItem, BatchKind, BatchPage, BatchResult
from ..database import BatchItemRow, BatchRow, delete_rows
from ..stored_answers import encode_json


def add(engine: Engine, batch: Batch, items: Sequence[BatchItem]) -> Batch:
    row = {
        "kind": batch.kind,
        "owner": batch.owner,
        "id": batch.id,
        "created": batch.created,
        "expires": batch.expires,
        "total": len(items),
        "details": encode_json(batch.details),
    }
    with engine.begin() as connection:
        seq = connection.execute(insert(BatchRow), row).lastrowid
        connection.execute(insert(BatchItemRow), [_item_row(seq, item) for item in items])
    return replace(batch, seq=seq, total=len(items), counts=BatchCounts(pending=len(items)))


def get(engine: Engine, kind: BatchKind, owner: str, id_: str) -> Batch | None:
    with Session(engine) as session:
        row = session.scalars(select(BatchRow).where(_is(kind, owner, id_))).first()
        return None if row is None else _batches(session, [row])[0]


def find(engine: Engine, page: BatchPage) -> list[Batch] | None:
    seq = col(BatchRow.seq)
    statement = select(BatchRow).where(col(BatchRow.kind) == page.kind, col(BatchRow.owner) == page.owner)
    with Session(engine) as session:
        for id_, newer in ((page.after, False), (page.before, True)):
            if not id_:
                continue
            place = session.scalars(select(seq).where(_is(page.kind, page.owner, id_))).first()
            if place is None:
                return None
            statement = statement.where(seq > place if newer else seq < place)
        nearest = bool(page.before) and not page.after
        ordered = statement.order_by(seq.asc() if nearest else seq.desc()).limit(page.limit + 1)
        return _batches(session, session.scalars(ordered).all())


def unfinished(engine: Engine) -> list[Batch]:
    """Batches that have not ended, oldest first."""
    statement = select(BatchRow).where(col(BatchRow.ended).is_(None)).order_by(col(BatchRow.seq))
    with Session(engine) as session:
        return _batches(session, session.scalars(statement).all())


def pending(engine: Engine, batch: int, after: int, limit: int) -> list[BatchItem]:
    seq = col(BatchItemRow.seq)
    statement = (
        select(BatchItemRow)
        .where(col(BatchItemRow.batch) == batch, col(BatchItemRow.status) == "pending", seq > after)
        .order_by(seq)
        .limit(limit)
    )
    with Session(engine) as session:
        return [
            BatchItem(custom_id=row.custom_id, path=row.path, body=row.body.encode(), seq=row.seq or 0)
            for row in session.scalars(statement)
        ]


def record(engine: Engine, item: int, http_status: int, request_id: str, answer: str) -> int:
    """Store an answer. Returns the bytes written."""
    size = len(answer.encode())
    is_pending = and_(col(BatchItemRow.seq) == item, col(BatchItemRow.status) == "pending")
    values = {
        "status": "done",
        "body": "",
        "http_status": http_status,
        "request_id": request_id,
        "answer": answer,
        "size": size,
    }
    with engine.begin() as connection:
        if connection.execute(change(BatchItemRow).where(is_pending).values(**values)).rowcount:
            batch = connection.execute(
                select(col(BatchItemRow.batch)).where(col(BatchItemRow.seq) == item)
            ).scalar_one()
            _end_if_done(connection, batch)
    return size


def end(engine: Engine, batch: int, status: Literal["cancelled", "expired"]) -> None:
    now = time.time()
    rest = and_(col(BatchItemRow.batch) == batch, col(BatchItemRow.status) == "pending")
    with engine.begin() as connection:
        running = and_(col(BatchRow.seq) == batch, col(BatchRow.ended).is_(None))
        if status == "cancelled":
            connection.execute(change(BatchRow).where(running).values(cancelled=now))
        connection.execute(change(BatchItemRow).where(rest).values(status=status, body="", size=0))
        connection.execute(change(BatchRow).where(running).values(ended=now))


def results(engine: Engine, batch: int, after: int, limit: int) -> list[BatchResult]:
    """Results in the order of the requests; pending ones are left out."""
    seq = col(BatchItemRow.seq)
    statement = (
        select(BatchItemRow)
        .where(col(BatchItemRow.batch) == batch, col(BatchItemRow.status) != "pending", seq > after)
        .order_by(seq)
        .limit(limit)
    )
    with Session(engine) as session:
        return [_result(row, row.answer) for row in session.scalars(statement)]


def result_sizes(engine: Engine, batch: int) -> list[tuple[BatchResult, int]]:
    """Results without their answers, each with the bytes of its answer."""
    names = ("seq", "custom_id", "status", "http_status", "request_id", "size")
    statement = select(*(col(getattr(BatchItemRow, name)) for name in names)).where(
        col(BatchItemRow.batch) == batch, col(BatchItemRow.status) != "pending"
    )
    with engine.connect() as connection:
        return [(_result(row, ""), row.size) for row in connection.execute(statement)]


def _result(row: Any, answer: str) -> BatchResult:
    return BatchResult(
        custom_id=row.custom_id,
        seq=row.seq or 0,
        status=msgspec.convert(row.status, Literal["done", "cancelled", "expired"]),
        http_status=row.http_status,
        request_id=row.request_id,
        answer=answer.encode(),
    )


def delete(engine: Engine, kind: BatchKind, owner: str, id_: str) -> bool:
    return delete_rows(engine, BatchRow, _is(kind, owner, id_))


def erase(engine: Engine, before: float, *, ended_only: bool) -> int:
    """Delete batches created before a Unix time and return their number. Disk space is freed separately."""
    statement = delete_from(BatchRow).where(col(BatchRow.created) < before)
    if ended_only:
        statement = statement.where(col(BatchRow.ended).is_not(None))
    with engine.begin() as connection:
        return connection.execute(statement).rowcount


def size(engine: Engine, owner: str | None = None) -> int:
    """Bytes of requests and answers, of one owner or of all."""
    statement = select(func.coalesce(func.sum(BatchItemRow.size), 0))
    if owner is not None:
        joined = col(BatchRow.seq) == col(BatchItemRow.batch)
        statement = statement.join(BatchRow, joined).where(col(BatchRow.owner) == owner)
    with engine.connect() as connection:
        return connection.execute(statement).scalar_one()


def _end_if_done(connection: Connection, batch: int) -> None:
    pending = col(BatchItemRow.batch) == batch, col(BatchItemRow.status) == "pending"
    if connection.execute(select(col(BatchItemRow.seq)).where(*pending).limit(1)).first() is None:
        connection.execute(change(BatchRow).where(col(BatchRow.seq) == batch).values(ended=time.time()))


def _item_row(batch: int, item: BatchItem) -> dict[str, object]:
    return {
        "batch": batch,
        "custom_id": item.custom_id,
        "path": item.path,
        "status": "pending",
        "body": item.body.decode(),
        "http_status": 0,
        "request_id": "",
        "answer": "",
        "size": len(item.body),
    }


def _is(kind: BatchKind, owner: str, id_: str) -> ColumnElement[bool]:
    return and_(col(BatchRow.kind) == kind, col(BatchRow.owner) == owner, col(BatchRow.id) == id_)


def _batches(session: Session, rows: Sequence[BatchRow]) -> list[Batch]:
    counts = _counts(session, [row.seq for row in rows])
    return [
        Batch(
            kind="openai" if row.kind == "openai" else "anthropic",
            owner=row.owner,
            id=row.id,
            created=row.created,
            expires=row.expires,
            ended=row.ended,
            cancelled=row.cancelled,
            total=row.total,
            details=msgspec.json.decode(row.details),
            counts=BatchCounts(**counts[row.seq]),
            seq=row.seq or 0,
        )
        for row in rows
    ]


def _counts(session: Session, batches: Sequence[int | None]) -> dict[int | None, dict[str, int]]:
    """Count the items of each batch by their status."""
    batch, status = col(BatchItemRow.batch), col(BatchItemRow.status)
    is_ok = col(BatchItemRow.http_status) == 200
    found: dict[int | None, dict[str, int]] = {each: {} for each in batches}
    statement = select(batch, status, is_ok, func.count()).where(batch.in_(batches))
    for number, word, ok, count in session.execute(statement.group_by(batch, status, is_ok)):
        name = ("succeeded" if ok else "failed") if word == "done" else word
        found[number][name] = found[number].get(name, 0) + count
    return found
