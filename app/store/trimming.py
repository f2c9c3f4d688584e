"""Schedule of the retention: when the file is checked for old or excess data, and by which clock. Importable
without SQLAlchemy.
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
_LEAP_S = 3 * 86_400.0
"""Seconds that the wall clock may be ahead of the expected time, as after a weekend of sleep."""
_DOUBT_S = 86_400.0
"""Seconds of running after which a wall clock that jumped further ahead is believed."""


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
    sweep_files: Callable[[float], None] | None = None
    """Applies retention to uploaded files; called with the Unix time from which ages are counted."""
    owners: Callable[[], frozenset[str]] | None = None
    """Returns the ids of the existing keys: data stored by others is erased."""


class RetentionClock:
    """Unix time from which ages are counted: the wall clock, unless it has jumped ahead.

    A wall clock that jumps ahead makes everything look old, and what is erased then is gone. So ages go on
    with the monotonic clock from the last time that was believed, until the wall clock has kept step with it
    for `_DOUBT_S`. A jump of less than `_LEAP_S` is believed at once (the machine slept), and so is one back,
    which erases nothing. A start may advance the time by `_LEAP_S` too, so that daemons that never run for so
    long catch up.
    """

    def __init__(self) -> None:
        self._read_at = time.monotonic()
        self._now = time.time()
        self._is_first = True
        self._doubt: tuple[float, float] | None = None
        """The wall clock's lead of the monotonic one since it jumped, and when that was noticed."""

    def read(self, stored: float | None) -> float:
        """Return the time. `stored`: the last one that was returned before this start, if it is known."""
        wall, monotonic = time.time(), time.monotonic()
        before = stored if self._is_first and stored is not None else self._now
        reckoned = before + monotonic - self._read_at
        self._read_at = monotonic
        if wall <= reckoned + _LEAP_S or self._is_believed(wall - monotonic, monotonic):
            self._now, self._doubt = wall, None
        else:
            self._now = reckoned + (_LEAP_S if self._is_first else 0.0)
        self._is_first = False
        return self._now

    def _is_believed(self, lead: float, monotonic: float) -> bool:
        if self._doubt is None or abs(self._doubt[0] - lead) > _LEAP_S:
            self._doubt = lead, monotonic
            log.warning("the wall clock has jumped ahead: for a day, the request log deletes nothing by age")
        return monotonic - self._doubt[1] >= _DOUBT_S


class Trimmer:
    """Runs retention when it is due. Belongs to the writer thread."""

    def __init__(self, path: Path, keep: Retention) -> None:
        self._path, self._keep = path, keep
        self._clock = RetentionClock()
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
        if engine is None:
            self._sweep_files(self._clock.read(None))
            return
        from .queries.requests import last_trim, trim  # noqa: PLC0415 - SQLAlchemy belongs to the store's threads

        try:
            now = self._clock.read(last_trim(engine))
            self._sweep_files(now)
            trim(engine, self._path, self._keep, now)
        except Exception as error:  # noqa: BLE001 - tried again in an hour
            log.warning("the request log could not delete old rows: %s", first_line(error))

    def _sweep_files(self, now: float) -> None:
        if self._keep.sweep_files is not None:
            with contextlib.suppress(OSError):  # tried again in an hour
                self._keep.sweep_files(now)
