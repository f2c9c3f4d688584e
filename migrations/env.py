"""Alembic's entry for developers (`alembic -c migrations/alembic.ini revision ...`).

The daemon migrates through `llmbox.app.store.database.upgrade` and does not come through here.
"""

from alembic import context
from sqlalchemy import create_engine
from sqlmodel import SQLModel

import llmbox.app.store.database  # noqa: F401 - registers the tables


def run() -> None:
    engine = create_engine(context.config.get_main_option("sqlalchemy.url") or "sqlite://")
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=SQLModel.metadata, render_as_batch=True)
        with context.begin_transaction():
            context.run_migrations()


run()
