"""Tables of the request log, and deletion of rows of any. A changed table needs a migration in
`migrations/versions`.
"""

from sqlalchemy import Column, ColumnElement, Engine, ForeignKey, Index, Integer, delete
from sqlmodel import Field, SQLModel

from .database import give_back_space


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
