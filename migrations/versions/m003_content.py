"""What the prefix cache had of a prompt, a hash of the answer; where a key allows it, prompt and answer."""

import sqlalchemy as sa
from alembic import op

revision = "003"
down_revision = "002"


def upgrade() -> None:
    op.add_column("request", sa.Column("looked_up_tokens", sa.Integer, nullable=False, server_default="0"))
    for name in ("prefix_end", "output_hash", "fingerprint", "content"):
        op.add_column("request", sa.Column(name, sa.String, nullable=False, server_default=""))
    op.create_table(
        "content",
        sa.Column("seq", sa.Integer, sa.ForeignKey("request.seq", ondelete="CASCADE"), primary_key=True),
        sa.Column("created", sa.Float, nullable=False),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("body_bytes", sa.Integer, nullable=False),
        sa.Column("prompts", sa.String, nullable=False),
        sa.Column("prompt_bytes", sa.Integer, nullable=False),
        sa.Column("outputs", sa.String, nullable=False),
        sa.Column("output_bytes", sa.Integer, nullable=False),
    )
    op.create_index("ix_content_created", "content", ["created"])
