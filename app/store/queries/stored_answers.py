"""SQL of stored answers, as functions of an open database."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Engine, and_, func, insert, select, text
from sqlalchemy import delete as delete_from
from sqlalchemy import update as change
from sqlmodel import Session, col

from ..database import BatchRow, ConversationRow, PanelItemRow, StoredRow, delete_rows, give_back_space
from ..stored_answers import Kind, StoredAnswer, StoredFilter, StoredTotal, encode_json

_OVER = text(
    "DELETE FROM stored WHERE seq IN (SELECT seq FROM"
    " (SELECT seq, sum(size) OVER (ORDER BY seq DESC) AS total FROM stored) WHERE total > :most)"
)
_HAS = "EXISTS (SELECT 1 FROM json_each(stored.details) WHERE key = :k{n} AND value = :v{n})"


def put(engine: Engine, answer: StoredAnswer) -> int:
    """Insert an answer, replacing one of the same id. Returns its bytes."""
    texts = {
        "details": encode_json(answer.metadata),
        "input": encode_json(answer.input),
        "answer": encode_json(answer.answer),
    }
    size = sum(len(each.encode()) for each in texts.values())
    row = {
        "kind": answer.kind,
        "owner": answer.owner,
        "id": answer.id,
        "created": answer.created,
        "model": answer.model,
        "previous": answer.previous,
        "size": size,
        **texts,
    }
    with engine.begin() as connection:
        connection.execute(delete_from(StoredRow).where(_is(answer.kind, answer.owner, answer.id)))
        connection.execute(insert(StoredRow), row)
    return size


def get(engine: Engine, kind: Kind, owner: str, id_: str) -> StoredAnswer | None:
    return next(iter(chain(engine, kind, owner, id_, 1)), None)


def chain(engine: Engine, kind: Kind, owner: str, id_: str, most: int) -> list[StoredAnswer]:
    """Return the answers of a chain, oldest first."""
    found: list[StoredAnswer] = []
    with Session(engine) as session:  # one connection for all of them: opening one takes longer than a look
        while id_ and len(found) < most:
            row = session.scalars(select(StoredRow).where(_is(kind, owner, id_))).first()
            if row is None:
                break
            found.append(_answer(row))
            id_ = row.previous
    return found[::-1]


def find(engine: Engine, want: StoredFilter) -> list[StoredAnswer] | None:
    seq = col(StoredRow.seq)
    statement = select(StoredRow).where(col(StoredRow.kind) == want.kind, col(StoredRow.owner) == want.owner)
    if want.model is not None:
        statement = statement.where(col(StoredRow.model) == want.model)
    for number, (key, value) in enumerate(want.metadata.items()):
        has = text(_HAS.format(n=number)).bindparams(**{f"k{number}": key, f"v{number}": value})
        statement = statement.where(has)
    with Session(engine) as session:
        if want.after:
            place = session.scalars(select(seq).where(_is(want.kind, want.owner, want.after))).first()
            if place is None:
                return None
            statement = statement.where(seq < place if want.newest_first else seq > place)
        order = seq.desc() if want.newest_first else seq.asc()
        return [_answer(row) for row in session.scalars(statement.order_by(order).limit(want.limit))]


def update(engine: Engine, kind: Kind, owner: str, id_: str, metadata: Mapping[str, str]) -> bool:
    new = encode_json(metadata)
    place = _is(kind, owner, id_)
    with engine.begin() as connection:
        old = connection.execute(select(col(StoredRow.details)).where(place)).scalar()
        if old is None:
            return False
        grown = col(StoredRow.size) + len(new.encode()) - len(old.encode())
        connection.execute(change(StoredRow).where(place).values(details=new, size=grown))
    return True


def append(engine: Engine, kind: Kind, owner: str, id_: str, items: Sequence[Any], now: float) -> int:
    """Append items to an answer. Returns the bytes added."""
    place = _is(kind, owner, id_)
    with engine.begin() as connection:
        old = connection.execute(select(col(StoredRow.input)).where(place)).scalar()
        if old is None:
            return 0
        new = encode_json([*msgspec.json.decode(old), *items])
        more = len(new.encode()) - len(old.encode())
        values = {"input": new, "size": col(StoredRow.size) + more, "created": now}
        connection.execute(change(StoredRow).where(place).values(**values))
    return more


def remove_item(engine: Engine, kind: Kind, owner: str, id_: str, item: str) -> bool:
    """Remove an item, with the copies in the write-ahead log."""
    place = _is(kind, owner, id_)
    with engine.begin() as connection:
        old = connection.execute(select(col(StoredRow.input)).where(place)).scalar()
        items = [] if old is None else msgspec.json.decode(old)
        left = [each for each in items if each.get("id") != item]
        if old is None or len(left) == len(items):
            return False
        new = encode_json(left)
        smaller = col(StoredRow.size) + len(new.encode()) - len(old.encode())
        connection.execute(change(StoredRow).where(place).values(input=new, size=smaller))
    give_back_space(engine)
    return True


def delete(engine: Engine, kind: Kind, owner: str, id_: str) -> bool:
    return delete_rows(engine, StoredRow, _is(kind, owner, id_))


def erase(engine: Engine, before: float) -> int:
    """Delete answers stored before a Unix time and return their number. Disk space is freed separately."""
    with engine.begin() as connection:
        return connection.execute(delete_from(StoredRow).where(col(StoredRow.created) < before)).rowcount


def erase_owners_but(engine: Engine, known: frozenset[str]) -> int:
    """Delete answers, batches, conversations and items of the panel that belong to keys that are not `known`,
    with the copies in the write-ahead log. Rows without an owner stay.
    """
    count = 0
    with engine.begin() as connection:
        for table in (StoredRow, BatchRow, ConversationRow, PanelItemRow):
            owner = col(table.owner)
            owners = connection.execute(select(owner).distinct()).scalars().all()
            for gone in (each for each in owners if each and each not in known):
                count += connection.execute(delete_from(table).where(owner == gone)).rowcount
    if count:
        give_back_space(engine)
    return count


def erase_over(engine: Engine, most: int) -> int:
    """Delete the oldest answers until at most `most` bytes of texts are left."""
    with engine.begin() as connection:
        return connection.execute(_OVER, {"most": most}).rowcount


def size(engine: Engine) -> int:
    """Bytes of texts."""
    with engine.connect() as connection:
        return connection.execute(select(func.coalesce(func.sum(StoredRow.size), 0))).scalar_one()


def totals(engine: Engine) -> list[StoredTotal]:
    owner, kind, created = col(StoredRow.owner), col(StoredRow.kind), col(StoredRow.created)
    numbers = (func.count(), func.sum(StoredRow.size), func.min(created), func.max(created))
    with engine.connect() as connection:
        rows = connection.execute(select(owner, kind, *numbers).group_by(owner, kind).order_by(owner, kind))
        return [
            StoredTotal(owner=of, kind=_kind(what), answers=count, size=total, oldest=oldest, newest=newest)
            for of, what, count, total, oldest, newest in rows
        ]


def _is(kind: Kind, owner: str, id_: str) -> ColumnElement[bool]:
    return and_(col(StoredRow.kind) == kind, col(StoredRow.owner) == owner, col(StoredRow.id) == id_)


def _answer(row: StoredRow) -> StoredAnswer:
    return StoredAnswer(
        kind=_kind(row.kind),
        owner=row.owner,
        id=row.id,
        created=row.created,
        model=row.model,
        previous=row.previous,
        metadata=msgspec.json.decode(row.details),
        input=msgspec.json.decode(row.input),
        answer=msgspec.json.decode(row.answer),
    )


def _kind(text: str) -> Kind:
    kinds: dict[str, Kind] = {"chat": "chat", "conversation": "conversation"}
    return kinds.get(text, "response")
