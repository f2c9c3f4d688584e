"""Answers that their callers wanted stored: responses and chat completions, with what they answer."""

import sqlalchemy as sa
from alembic import op

revision = "005"
down_revision = "004"


def upgrade() -> None:
    op.create_table(
        "stored",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("previous", sa.String, nullable=False),
        sa.Column("details", sa.String, nullable=False),
        sa.Column("input", sa.String, nullable=False),
        sa.Column("answer", sa.String, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
    )
    op.create_index("ix_stored_place", "stored", ["kind", "owner", "id"], unique=True)
    op.create_index("ix_stored_created", "stored", ["created"])
