"""Retention of rows, contents and stored answers. Erased data is overwritten, its space freed, and the WAL
emptied.
"""

import time
from pathlib import Path
from typing import Literal

from sqlalchemy import Engine

from .database import empty_size, erase_damaged, give_back_space
from .database_file import size_on_disk
from .queries import batches as batch_queries
from .queries import conversations as conversation_queries
from .queries import requests as queries
from .queries import stored_answers as stored_queries
from .record import StoreError
from .trimming import Retention

_DAY_S, _HOUR_S = 86_400, 3600
_TRIES = 20
_TRY_S = 0.1
_ROUNDS = 30
_LEAST_SHARE = 0.1  # so that the cap is not exceeded again at once


What = Literal["requests", "content", "stored"]
"""Data to erase: rows with everything that belongs to them; only prompts and answers; only stored answers and
batches.
"""


def last_trim(engine: Engine) -> float | None:
    """Return the Unix time by which `trim` last counted ages, in whole hours. None if it never did."""
    with engine.connect() as connection:
        hours = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    return hours * _HOUR_S if hours > 0 else None


def trim(engine: Engine, path: Path, keep: Retention, now: float) -> None:
    """Apply the age limits at a Unix time, then the byte limits: drop the oldest, contents before rows."""
    with engine.begin() as connection:  # 32 bits hold no seconds after 2038
        connection.exec_driver_sql(f"PRAGMA user_version = {max(0, int(now // _HOUR_S))}")
    queries.erase(engine, now - keep.content_days * _DAY_S, content_only=True)
    queries.erase(engine, now - keep.rows_days * _DAY_S)
    stored_queries.erase(engine, now - keep.stored_days * _DAY_S)
    batch_queries.erase(engine, now - keep.batch_days * _DAY_S, ended_only=True)
    if keep.owners is not None:
        stored_queries.erase_owners_but(engine, keep.owners())
    stored_queries.erase_over(engine, keep.stored_bytes)
    erase_damaged(
        path, now - min(keep.rows_days, keep.content_days, keep.stored_days, keep.batch_days) * _DAY_S
    )
    give_back_space(engine)
    most = keep.max_bytes + sum(
        kept.size(engine) for kept in (stored_queries, batch_queries, conversation_queries)
    )
    most += empty_size(engine)
    for _ in range(_ROUNDS):
        size = size_on_disk(path)
        over = 1 - most / size if size else 0.0
        if over <= 0 or not queries.erase_oldest(engine, max(_LEAST_SHARE, over)):
            break
        give_back_space(engine)


def purge(engine: Engine, path: Path, before: float, what: What) -> int:
    """Erase data created before a Unix time and return the number of rows.

    Raises StoreError when a reader holds the write-ahead log, which may have copies.
    """
    count = stored_queries.erase(engine, before) + batch_queries.erase(engine, before, ended_only=False)
    if what != "stored":
        count += queries.erase(engine, before, content_only=what == "content")
    erase_damaged(path, before)
    for _ in range(_TRIES):
        if give_back_space(engine):
            return count
        time.sleep(_TRY_S)
    raise StoreError(
        f"{count} were erased, but somebody else reads {path.name}, so copies may be left in "
        f"{path.name}-wal; end the other reader and purge again"
    )
