"""Conversations of the panel's chat."""

import sqlalchemy as sa
from alembic import op

revision = "008"
down_revision = "007"


def upgrade() -> None:
    op.create_table(
        "panel_conversation",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("title", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("updated", sa.Float, nullable=False),
        sa.Column("body", sa.String, nullable=False),
    )
    op.create_index("ix_panel_conversation_place", "panel_conversation", ["owner", "id"], unique=True)
