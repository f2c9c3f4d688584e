"""Prompt tokens of each request that came from main memory to a GPU."""

import sqlalchemy as sa
from alembic import op

revision = "014"
down_revision = "013"


def upgrade() -> None:
    op.add_column("request", sa.Column("host_tokens", sa.Integer, nullable=False, server_default="0"))
