"""Times of each sequence of a request, in the daemon and in the engine."""

import sqlalchemy as sa
from alembic import op

revision = "012"
down_revision = "011"


def upgrade() -> None:
    op.create_table(
        "sequence_times",
        sa.Column("seq", sa.Integer, sa.ForeignKey("request.seq", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
