"""The first schema: one row a finished request."""

import sqlalchemy as sa
from alembic import op

revision = "001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "request",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("endpoint", sa.String, nullable=False),
        sa.Column("http_status", sa.Integer, nullable=False),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("finish_reasons", sa.String, nullable=False),
        sa.Column("error_code", sa.String, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("output_tokens", sa.Integer, nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("queue_s", sa.Float),
        sa.Column("ttft_s", sa.Float),
        sa.Column("tpot_s", sa.Float),
        sa.Column("e2e_s", sa.Float),
        sa.Column("resumes", sa.Integer, nullable=False),
        sa.Column("seed", sa.Integer),
        sa.Column("params", sa.String, nullable=False),
        sa.Column("client", sa.String, nullable=False),
    )
    op.create_index("ix_request_id", "request", ["id"])
    op.create_index("ix_request_created", "request", ["created"])
