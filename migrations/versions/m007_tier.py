"""Class of each request, by its priority."""

import sqlalchemy as sa
from alembic import op

revision = "007"
down_revision = "006"


def upgrade() -> None:
    op.add_column("request", sa.Column("tier", sa.String, nullable=False, server_default=""))
