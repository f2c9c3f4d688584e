"""Presets and MCP servers of the panel's chat."""

import sqlalchemy as sa
from alembic import op

revision = "009"
down_revision = "008"


def upgrade() -> None:
    op.create_table(
        "panel_item",
        sa.Column("seq", sa.Integer, primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
    )
    op.create_index("ix_panel_item_place", "panel_item", ["owner", "kind", "name"], unique=True)
