"""Prompt tokens of each request that came from the KV cache on disk."""

import sqlalchemy as sa
from alembic import op

revision = "010"
down_revision = "009"


def upgrade() -> None:
    op.add_column("request", sa.Column("disk_tokens", sa.Integer, nullable=False, server_default="0"))
