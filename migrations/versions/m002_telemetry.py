"""Telemetry history: one row a moment and resolution, all series of that moment in one JSON object."""

import sqlalchemy as sa
from alembic import op

revision = "002"
down_revision = "001"


def upgrade() -> None:
    op.create_table(
        "telemetry",
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("series", sa.String, nullable=False),
    )
