"""Draft tokens of each request that were verified, and accepted."""

import sqlalchemy as sa
from alembic import op

revision = "011"
down_revision = "010"


def upgrade() -> None:
    for name in ("draft_tokens", "accepted_tokens"):
        op.add_column("request", sa.Column(name, sa.Integer, nullable=False, server_default="0"))
