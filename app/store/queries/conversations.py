"""SQL of the panel's conversations and items, as functions of an open database."""

import msgspec
from sqlalchemy import ColumnElement, Engine, LargeBinary, and_, cast, func, insert, or_, select
from sqlalchemy import update as change
from sqlmodel import col

from ..conversations import (
    KINDS,
    ChatToolServer,
    ConversationBody,
    ConversationSummary,
    ToolServerSecrets,
    encode_body,
    has_values,
    without_values,
)
from ..database import ConversationRow, PanelItemRow, delete_rows, give_back_space


def list_of(engine: Engine, owner: str, text: str, limit: int) -> list[ConversationSummary]:
    names = ("id", "title", "model", "created", "updated")
    statement = select(*(col(getattr(ConversationRow, name)) for name in names))
    statement = statement.where(col(ConversationRow.owner) == owner)
    if text:
        # Messages are JSON: what is looked for is written as it stands there.
        inside = msgspec.json.encode(text).decode()[1:-1]
        statement = statement.where(
            or_(
                col(ConversationRow.title).contains(text, autoescape=True),
                col(ConversationRow.body).contains(inside, autoescape=True),
            )
        )
    statement = statement.order_by(col(ConversationRow.updated).desc()).limit(limit)
    with engine.connect() as connection:
        return [ConversationSummary(**row) for row in connection.execute(statement).mappings()]


def get(engine: Engine, owner: str, id_: str) -> ConversationBody | None:
    statement = select(col(ConversationRow.body)).where(_is(owner, id_))
    with engine.connect() as connection:
        body = connection.execute(statement).scalar()
    return None if body is None else msgspec.json.decode(body, type=ConversationBody)


def put(engine: Engine, owner: str, id_: str, body: ConversationBody, now: float) -> None:
    values = {"title": body.title, "model": body.model, "updated": now, "body": encode_body(body)}
    with engine.begin() as connection:
        if connection.execute(change(ConversationRow).where(_is(owner, id_)).values(**values)).rowcount:
            return
        connection.execute(insert(ConversationRow).values(owner=owner, id=id_, created=now, **values))


def delete(engine: Engine, owner: str, id_: str) -> bool:
    return delete_rows(engine, ConversationRow, _is(owner, id_))


def size(engine: Engine) -> int:
    """Bytes of conversations."""
    bodies = func.length(cast(col(ConversationRow.body), LargeBinary))
    with engine.connect() as connection:
        found: int = connection.execute(select(func.coalesce(func.sum(bodies), 0))).scalar_one()
    return found


def _is(owner: str, id_: str) -> ColumnElement[bool]:
    return and_(col(ConversationRow.owner) == owner, col(ConversationRow.id) == id_)


def items_of(engine: Engine, owner: str, kind: str) -> list[tuple[str, str]]:
    """Return names and bodies."""
    statement = select(col(PanelItemRow.name), col(PanelItemRow.body))
    statement = statement.where(col(PanelItemRow.owner) == owner, col(PanelItemRow.kind) == kind)
    with engine.connect() as connection:
        return [(name, body) for name, body in connection.execute(statement.order_by(col(PanelItemRow.name)))]


def put_item(engine: Engine, owner: str, kind: str, name: str, body: str) -> None:
    statement = change(PanelItemRow).where(_is_item(owner, kind, name)).values(body=body)
    with engine.begin() as connection:
        if connection.execute(statement).rowcount:
            return
        connection.execute(insert(PanelItemRow).values(owner=owner, kind=kind, name=name, body=body))


def move_secrets(engine: Engine, secrets: ToolServerSecrets) -> None:
    """Move the secrets of MCP servers out of the database, with the copies in the write-ahead log."""
    places = (col(PanelItemRow.owner), col(PanelItemRow.name), col(PanelItemRow.body))
    kind = KINDS[ChatToolServer]
    with engine.connect() as connection:
        rows = connection.execute(select(*places).where(col(PanelItemRow.kind) == kind)).all()
    specs = [(owner, name, msgspec.json.decode(body, type=ChatToolServer)) for owner, name, body in rows]
    left = [each for each in specs if has_values(each[2])]
    for owner, name, spec in left:
        secrets.save(owner, name, spec)
        put_item(engine, owner, kind, name, encode_body(without_values(spec)))
    if left:
        give_back_space(engine)


def delete_item(engine: Engine, owner: str, kind: str, name: str) -> bool:
    return delete_rows(engine, PanelItemRow, _is_item(owner, kind, name))


def _is_item(owner: str, kind: str, name: str) -> ColumnElement[bool]:
    return and_(
        col(PanelItemRow.owner) == owner, col(PanelItemRow.kind) == kind, col(PanelItemRow.name) == name
    )
