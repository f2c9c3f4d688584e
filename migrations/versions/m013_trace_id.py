"""Trace that a request belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "013"
down_revision = "012"


def upgrade() -> None:
    op.add_column("request", sa.Column("trace_id", sa.String, nullable=False, server_default=""))
