"""Marks beside the telemetry history: loads, evictions, refusals, restarts."""

import sqlalchemy as sa
from alembic import op

revision = "004"
down_revision = "003"


def upgrade() -> None:
    op.create_table(
        "mark",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
    )
    op.create_index("ix_mark_time", "mark", ["time"])
