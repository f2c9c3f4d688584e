"""Batches: lists of requests that run in the background, and their answers."""

import sqlalchemy as sa
from alembic import op

revision = "006"
down_revision = "005"


def upgrade() -> None:
    op.create_table(
        "batch",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("expires", sa.Float, nullable=False),
        sa.Column("ended", sa.Float),
        sa.Column("cancelled", sa.Float),
        sa.Column("total", sa.Integer, nullable=False),
        sa.Column("details", sa.String, nullable=False),
    )
    op.create_index("ix_batch_place", "batch", ["kind", "owner", "id"], unique=True)
    op.create_index("ix_batch_created", "batch", ["created"])
    op.create_table(
        "batch_item",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("batch", sa.Integer, sa.ForeignKey("batch.seq", ondelete="CASCADE"), nullable=False),
        sa.Column("custom_id", sa.String, nullable=False),
        sa.Column("path", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("http_status", sa.Integer, nullable=False),
        sa.Column("request_id", sa.String, nullable=False),
        sa.Column("answer", sa.String, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
    )
    op.create_index("ix_batch_item_status", "batch_item", ["batch", "status"])
