"""Schedule of the retention: when the file is checked for old or excess data. Importable without
SQLAlchemy.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .record import first_line

if TYPE_CHECKING:
    from sqlalchemy import Engine

log = logging.getLogger(__name__)

_EVERY_S = 3600.0
_EVERY_BYTES = 8 << 20  # sooner after so much was written
_FIRST_S = 60.0  # after the start, which has other work to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Retention limits: ages in days, sizes in bytes."""

    rows_days: float = 30
    content_days: float = 7
    max_bytes: int = 256_000_000
    """Limit of the file, without stored answers, batches and conversations."""
    stored_days: float = 30
    stored_bytes: int = 256_000_000
    """Limit of the texts of stored answers."""
    batch_days: float = 30
    sweep_files: Callable[[], None] | None = None
    """Applies retention to uploaded files."""
    owners: Callable[[], frozenset[str]] | None = None
    """Returns the ids of the existing keys: data stored by others is erased."""


class Trimmer:
    """Runs retention when it is due. Belongs to the writer thread."""

    def __init__(self, path: Path, keep: Retention) -> None:
        self._path, self._keep = path, keep
        self._next = time.monotonic() + _FIRST_S
        self._written = 0

    def wait_s(self) -> float:
        """Seconds until the next check without traffic."""
        return max(0.0, self._next - time.monotonic())

    def wrote(self, size: int) -> None:
        self._written += size

    def trim(self, engine: "Engine | None") -> None:
        """Apply retention if it is due. Never raises."""
        if time.monotonic() < self._next and self._written < _EVERY_BYTES:
            return
        self._next, self._written = time.monotonic() + _EVERY_S, 0
        if self._keep.sweep_files is not None:
            with contextlib.suppress(OSError):  # tried again in an hour
                self._keep.sweep_files()
        if engine is None:
            return
        from .retention import trim  # noqa: PLC0415 - SQLAlchemy belongs to the store's threads

        try:
            trim(engine, self._path, self._keep)
        except Exception as error:  # noqa: BLE001 - tried again in an hour
            log.warning("the request log keeps what it should forget: %s", first_line(error))
