"""SQL of the request log, and of the telemetry history and its annotations. Functions of an open database.

Retention of rows, contents and stored answers: erased data is overwritten, its space freed, and the WAL
emptied.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import sqlalchemy
from sqlalchemy import Connection, Engine, TextClause, case, delete, func, insert, text
from sqlalchemy.dialects import sqlite
from sqlmodel import Session, col, select

from ..database import (
    ContentRow,
    MarkRow,
    RequestRow,
    TelemetryRow,
    TimesRow,
    empty_size,
    erase_damaged,
    give_back_space,
)
from ..database_file import size_on_disk
from ..record import NOT_NOW, Content, RecordFilter, RecordTotals, RequestRecord, StoreError, to_json
from ..trimming import Retention
from . import batches as batch_queries
from . import conversations as conversation_queries
from . import stored_answers as stored_queries

_FIELDS = tuple(f.name for f in fields(RequestRecord))
Entry = tuple[RequestRecord, Content | None, Sequence[bytes]]


def add(engine: Engine, entries: Sequence[Entry]) -> None:
    """Insert all rows or none, in this order."""
    with engine.begin() as connection:
        connection.execute(insert(RequestRow), [_request_row(record) for record, _, _ in entries])
        # SQLite gives each row the number after the largest one.
        last = connection.execute(select(func.max(RequestRow.seq))).scalar_one() or 0
        contents, kept = list[dict[str, Any]](), list[dict[str, Any]]()
        for seq, (record, content, times) in enumerate(entries, last - len(entries) + 1):
            if content is not None:
                contents.append(_content_row(seq, record, content))
            kept += _times_rows(seq, times)
        for table, values in ((ContentRow, contents), (TimesRow, kept)):
            if values:
                connection.execute(insert(table), values)


def _request_row(record: RequestRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _FIELDS}


def _content_row(seq: int, record: RequestRecord, content: Content) -> dict[str, Any]:
    texts = {"prompts": to_json(content.prompts), "outputs": to_json(content.outputs)}
    return asdict(content) | texts | {"seq": seq, "created": record.created}


def add_times(engine: Engine, record: RequestRecord, times: Sequence[bytes]) -> None:
    """Insert the times of a row, if it is still there."""
    same = RequestRow.id == record.id, RequestRow.created == record.created
    with engine.begin() as connection:
        seq = connection.execute(select(func.max(RequestRow.seq)).where(*same)).scalar()
        if seq is not None and times:
            connection.execute(insert(TimesRow), _times_rows(seq, times))


def times_of(engine: Engine, request_id: str) -> list[bytes]:
    """Return the times of the newest row with this id."""
    seq = select(func.max(RequestRow.seq)).where(RequestRow.id == request_id).scalar_subquery()
    statement = select(TimesRow.data).where(col(TimesRow.seq) == seq).order_by(col(TimesRow.number))
    with engine.connect() as connection:
        return list(connection.execute(statement).scalars())


def _times_rows(seq: int, times: Sequence[bytes]) -> list[dict[str, Any]]:
    return [{"seq": seq, "number": number, "data": data} for number, data in enumerate(times)]


def find(engine: Engine, want: RecordFilter) -> list[tuple[int, RequestRecord]]:
    """Return (sequence number, record) in the order of the filter."""
    order = [getattr(RequestRow, want.order).desc().nulls_last()] if want.order else []
    statement = select(RequestRow).where(*_conditions(want)).order_by(*order, col(RequestRow.seq).desc())
    if want.before_seq is not None:
        statement = statement.where(col(RequestRow.seq) < want.before_seq)
    with Session(engine) as session:
        return [(row.seq or 0, _record(row)) for row in session.exec(statement.limit(want.limit))]


def totals(engine: Engine, want: RecordFilter) -> RecordTotals:
    """Sum all records that match the filter."""
    decode_s = col(RequestRow.tpot_s) * (col(RequestRow.output_tokens) - 1)
    statement = sqlalchemy.select(
        func.count(),
        func.coalesce(func.sum(case((col(RequestRow.error_code) != "", 1), else_=0)), 0),
        func.coalesce(func.sum(col(RequestRow.prompt_tokens)), 0),
        func.coalesce(func.sum(col(RequestRow.output_tokens)), 0),
        func.avg(col(RequestRow.ttft_s)),
        func.sum(decode_s),
        func.sum(case((col(RequestRow.tpot_s).is_(None), 0), else_=col(RequestRow.output_tokens) - 1)),
    ).where(*_conditions(want))
    with engine.connect() as connection:
        count, errors, into, out, ttft, seconds, decoded = connection.execute(statement).one()
    return RecordTotals(
        requests=count,
        errors=errors,
        tokens_in=into,
        tokens_out=out,
        ttft_s=ttft,
        rate=decoded / seconds if seconds else None,
    )


def names(engine: Engine) -> tuple[list[str], list[str]]:
    """Return the models and the keys that the log knows."""
    with engine.connect() as connection:
        models = connection.execute(select(RequestRow.model).distinct().limit(200)).scalars().all()
        keys = connection.execute(select(RequestRow.key).distinct().limit(200)).scalars().all()
    return sorted(filter(None, models)), sorted(filter(None, keys))


def _conditions(want: RecordFilter) -> list[Any]:
    found: list[Any] = []
    if want.model is not None:
        found.append(RequestRow.model == want.model)
    if want.key is not None:
        found.append(RequestRow.key == want.key)
    if want.status is not None:
        found.append(RequestRow.http_status == want.status)
    if want.errors_only:
        found.append(RequestRow.error_code != "")
    if want.since is not None:
        found.append(RequestRow.created >= want.since)
    return found


def get(engine: Engine, request_id: str) -> tuple[RequestRecord, Content | None] | None:
    """Get the newest row with this id (clients may send the same id twice)."""
    statement = select(RequestRow).where(RequestRow.id == request_id).order_by(col(RequestRow.seq).desc())
    with Session(engine) as session:
        row = session.exec(statement).first()
        if row is None:
            return None
        kept = session.get(ContentRow, row.seq)
        return _record(row), None if kept is None else _content(kept)


def earlier(engine: Engine, record: RequestRecord) -> list[tuple[str, Content]]:
    """Get (id, content) of at most 32 requests before `record` of its owner and model, newest first."""
    seq = select(func.max(RequestRow.seq)).where(RequestRow.id == record.id).scalar_subquery()
    owner = select(ContentRow.owner).where(col(ContentRow.seq) == seq).scalar_subquery()
    statement = (
        select(RequestRow.id, ContentRow)
        .join(ContentRow, col(ContentRow.seq) == col(RequestRow.seq))
        .where(col(RequestRow.seq) < seq, RequestRow.model == record.model, ContentRow.owner == owner)
        .order_by(col(RequestRow.seq).desc())
        .limit(32)
    )
    with Session(engine) as session:
        return [(request_id, _content(row)) for request_id, row in session.exec(statement)]


def erase(engine: Engine, before: float, *, content_only: bool = False) -> int:
    """Delete rows created before a Unix time and return their number. Disk space is freed separately."""
    table = ContentRow if content_only else RequestRow
    with engine.begin() as connection:
        return connection.execute(delete(table).where(col(table.created) < before)).rowcount


def erase_oldest(engine: Engine, share: float) -> bool:
    """Delete a share of the contents, or of the rows if there are no contents. False if nothing is left."""
    with engine.begin() as connection:
        return any(_erase_oldest(connection, table, share) for table in (ContentRow, RequestRow))


def _erase_oldest(connection: Connection, table: type[ContentRow | RequestRow], share: float) -> bool:
    seq = col(table.seq)
    oldest, newest = connection.execute(select(func.min(seq), func.max(seq))).one()
    if oldest is None or newest is None:
        return False
    connection.execute(delete(table).where(seq <= oldest + int((newest - oldest) * share)))
    return True


def _record(row: RequestRow) -> RequestRecord:
    return RequestRecord(**{name: getattr(row, name) for name in _FIELDS})


def _content(row: ContentRow) -> Content:
    values = {field.name: getattr(row, field.name) for field in fields(Content)}
    return Content(**values | {name: json.loads(values[name]) for name in ("prompts", "outputs")})


_BY_KEY = text(
    "SELECT key, count(*), sum(error_code != ''), sum(prompt_tokens), sum(output_tokens),"
    " min(created), max(created) FROM request GROUP BY key"
)


def by_key(engine: Engine) -> Sequence[Any]:
    """Usage per key: (key, requests, errors, prompt tokens, output tokens, oldest, newest). Reads the whole
    table.
    """
    with engine.connect() as connection:
        return connection.execute(_BY_KEY).all()


_FAILED = "(http_status >= 500 AND error_code NOT IN ('" + "', '".join(sorted(NOT_NOW)) + "'))"
_REFUSED = "(http_status = 429 OR (http_status >= 500 AND NOT _FAILED_))"


def _statement(sql: str) -> TextClause:
    return text(sql.replace("_REFUSED_", _REFUSED).replace("_FAILED_", _FAILED))


_BY_MODEL = _statement(
    "SELECT key, model, count(*) AS requests, sum(_FAILED_) AS failed, sum(_REFUSED_) AS refused,"
    " sum(prompt_tokens) AS tokens_in, sum(cached_tokens) AS tokens_cached, sum(output_tokens) AS tokens_out,"
    " count(ttft_s) AS measured FROM request WHERE created >= :since"
    " GROUP BY key, model ORDER BY requests DESC LIMIT 200"
)
_GOOD = _statement(
    "SELECT key, count(*) FROM request WHERE created >= :since AND model = :model AND ttft_s <= :ttft"
    " AND (tpot_s IS NULL OR tpot_s <= :tpot) GROUP BY key"
)
_OUTCOMES = _statement(
    "SELECT CAST((created - :since) / :step AS INTEGER) AS interval, sum(http_status < 400) AS answered,"
    " sum(_REFUSED_) AS refused, sum(_FAILED_) AS failed,"
    " sum(http_status >= 400 AND http_status < 500 AND http_status != 429) AS caller"
    " FROM request WHERE created >= :since GROUP BY interval"
)


def by_model(engine: Engine, since: float) -> Sequence[Any]:
    """Usage per key and model since a Unix time, most requests first."""
    with engine.connect() as connection:
        return connection.execute(_BY_MODEL, {"since": since}).all()


def count_good(engine: Engine, since: float, model: str, ttft: float, tpot: float) -> Sequence[Any]:
    """Count (key, answers of a model within both latencies). An answer of one token has no time per token."""
    values = {"since": since, "model": model, "ttft": ttft, "tpot": tpot}
    with engine.connect() as connection:
        return connection.execute(_GOOD, values).all()


def outcomes(engine: Engine, since: int, step: int) -> Sequence[Any]:
    """Count requests by outcome in each interval of `step` seconds from `since` on."""
    with engine.connect() as connection:
        return connection.execute(_OUTCOMES, {"since": since, "step": step}).all()


Row = tuple[int, int, str]
"""(step, time, JSON of the series)."""


def add_telemetry(engine: Engine, rows: Sequence[Row], keep: Mapping[int, int], now: int) -> None:
    """Write the rows and drop those older than `keep` seconds (by step), in one transaction."""
    values = [{"step": step, "time": time, "series": series} for step, time, series in rows]
    statement = sqlite.insert(TelemetryRow)
    with engine.begin() as connection:
        # After the clock was set back the same second is written twice: the newer row counts.
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["step", "time"], set_={"series": statement.excluded.series}
            ),
            values,
        )
        for step, seconds in keep.items():
            connection.execute(
                delete(TelemetryRow).where(
                    col(TelemetryRow.step) == step, col(TelemetryRow.time) < now - seconds
                )
            )


def find_telemetry(engine: Engine, step: int, since: int) -> list[tuple[int, str]]:
    """Return (time, JSON of the series), oldest first."""
    statement = (
        select(TelemetryRow.time, TelemetryRow.series)
        .where(TelemetryRow.step == step, col(TelemetryRow.time) >= since)
        .order_by(col(TelemetryRow.time))
    )
    with Session(engine) as session:
        return [(time, series) for time, series in session.exec(statement)]


def add_annotation(engine: Engine, time: float, kind: str, model: str, text: str, oldest: float) -> None:
    """Write one row and drop rows older than `oldest` (Unix seconds), in one transaction."""
    with Session(engine) as session:
        session.add(MarkRow(time=time, kind=kind, model=model, text=text))
        session.exec(delete(MarkRow).where(col(MarkRow.time) < oldest))
        session.commit()


def find_annotations(engine: Engine, since: float, most: int) -> list[tuple[float, str, str, str]]:
    """Return (time, kind, model, text), newest first."""
    statement = (
        select(MarkRow.time, MarkRow.kind, MarkRow.model, MarkRow.text)
        .where(MarkRow.time >= since)
        .order_by(col(MarkRow.time).desc(), col(MarkRow.seq).desc())
        .limit(most)
    )
    with Session(engine) as session:
        return [(time, kind, model, text) for time, kind, model, text in session.exec(statement)]


_DAY_S, _HOUR_S = 86_400, 3600
_TRIES = 20
_TRY_S = 0.1
_ROUNDS = 30
_LEAST_SHARE = 0.1  # so that the cap is not exceeded again at once


What = Literal["requests", "content", "stored"]
"""Data to erase: rows with everything that belongs to them; only prompts and answers; only stored answers and
batches.
"""


def last_trim(engine: Engine) -> float | None:
    """Return the Unix time by which `trim` last counted ages, in whole hours. None if it never did."""
    with engine.connect() as connection:
        hours = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    return hours * _HOUR_S if hours > 0 else None


def trim(engine: Engine, path: Path, keep: Retention, now: float) -> None:
    """Apply the age limits at a Unix time, then the byte limits: drop the oldest, contents before rows."""
    with engine.begin() as connection:  # 32 bits hold no seconds after 2038
        connection.exec_driver_sql(f"PRAGMA user_version = {max(0, int(now // _HOUR_S))}")
    erase(engine, now - keep.content_days * _DAY_S, content_only=True)
    erase(engine, now - keep.rows_days * _DAY_S)
    stored_queries.erase(engine, now - keep.stored_days * _DAY_S)
    batch_queries.erase(engine, now - keep.batch_days * _DAY_S, ended_only=True)
    if keep.owners is not None:
        stored_queries.erase_owners_but(engine, keep.owners())
    stored_queries.erase_over(engine, keep.stored_bytes)
    erase_damaged(
        path, now - min(keep.rows_days, keep.content_days, keep.stored_days, keep.batch_days) * _DAY_S
    )
    give_back_space(engine)
    most = keep.max_bytes + sum(
        kept.size(engine) for kept in (stored_queries, batch_queries, conversation_queries)
    )
    most += empty_size(engine)
    for _ in range(_ROUNDS):
        size = size_on_disk(path)
        over = 1 - most / size if size else 0.0
        if over <= 0 or not erase_oldest(engine, max(_LEAST_SHARE, over)):
            break
        give_back_space(engine)


def purge(engine: Engine, path: Path, before: float, what: What) -> int:
    """Erase data created before a Unix time and return the number of rows.

    Raises StoreError when a reader holds the write-ahead log, which may have copies.
    """
    count = stored_queries.erase(engine, before) + batch_queries.erase(engine, before, ended_only=False)
    if what != "stored":
        count += erase(engine, before, content_only=what == "content")
    erase_damaged(path, before)
    for _ in range(_TRIES):
        if give_back_space(engine):
            return count
        time.sleep(_TRY_S)
    raise StoreError(
        f"{count} were erased, but another process reads {path.name}, so copies may be left in "
        f"{path.name}-wal; end that process and purge again"
    )
