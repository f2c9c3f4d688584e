"""How long rows and contents stay, and erasing them for good: overwritten, given back, out of the WAL."""

import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine

from . import queries
from .database import erase_damaged, give_back_space, size_on_disk
from .errors import StoreError

_TRIES = 20
_TRY_S = 0.1
_ROUNDS = 30
_LEAST_SHARE = 0.1  # so that the cap is not met again at once


@dataclass(frozen=True, slots=True)
class Retention:
    rows_s: float
    content_s: float
    max_bytes: int


def trim(engine: Engine, path: Path, keep: Retention) -> None:
    """Keep to the times; and to the byte cap, by dropping the oldest, contents before rows."""
    now = time.time()
    queries.erase(engine, now - keep.content_s, content_only=True)
    queries.erase(engine, now - keep.rows_s)
    erase_damaged(path, now - min(keep.rows_s, keep.content_s))
    give_back_space(engine)
    for _ in range(_ROUNDS):
        size = size_on_disk(path)
        over = 1 - keep.max_bytes / size if size else 0.0
        if over <= 0 or not queries.erase_oldest(engine, max(_LEAST_SHARE, over)):
            break
        give_back_space(engine)


def purge(engine: Engine, path: Path, before: float, *, content_only: bool = False) -> int:
    """Erase what was created before a Unix time and return how many.

    Raises StoreError when a reader holds on to the write-ahead log, where copies may be.
    """
    count = queries.erase(engine, before, content_only=content_only)
    erase_damaged(path, before)
    for _ in range(_TRIES):
        if give_back_space(engine):
            return count
        time.sleep(_TRY_S)
    raise StoreError(
        f"{count} were erased, but somebody else reads {path.name}, so copies may be left in "
        f"{path.name}-wal; end the other reader and purge again"
    )
