"""Alembic migrations of the request log, from the first schema on."""
