"""Writing and reading the request log.

Writes go through a bounded queue to one thread that owns the only writing connection. When the disk is
full, the file locked or the queue long, rows are dropped, counted and said so: serving never waits.
SQLAlchemy is imported by that thread, so that the API is up before it.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from .record import RecordFilter, RequestRecord

if TYPE_CHECKING:
    from sqlalchemy import Engine

log = logging.getLogger(__name__)

_QUEUE_LIMIT = 10_000
_BATCH = 500
_TRIM_EVERY = 2_000  # rows written between two looks at retention and size
_SAY_DROPPED_EVERY_S = 60.0
T = TypeVar("T")


class RequestLog:
    """Open with `start()`, close with `close()`; `write` may be called from any thread at any time."""

    def __init__(self, path: Path, *, retention_days: float = 30, max_bytes: int = 256 << 20) -> None:
        self.path = path
        self.dropped = 0
        self._retention_s = retention_days * 86400
        self._max_bytes = max_bytes
        self._queue: queue.Queue[RequestRecord | Callable[[], None] | None] = queue.Queue(_QUEUE_LIMIT)
        self._engine: Engine | None = None
        self._opened = threading.Event()
        self._since_trim = 0
        self._said_dropped = -_SAY_DROPPED_EVERY_S
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def write(self, record: RequestRecord) -> None:
        """Queue one row. Never blocks; drops and counts when the queue is full."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._drop(1, "the queue is full")

    async def query(self, want: RecordFilter) -> list[tuple[int, RequestRecord]]:
        """(sequence number, record) of matching rows, newest first. Empty while the log cannot be read."""
        return await asyncio.to_thread(self._read, lambda queries, engine: queries.find(engine, want), [])

    async def get(self, request_id: str) -> RequestRecord | None:
        return await asyncio.to_thread(
            self._read, lambda queries, engine: queries.get(engine, request_id), None
        )

    async def purge(self, before: float) -> int:
        """Erase rows created before a Unix time; returns how many."""
        return await asyncio.to_thread(self._read, lambda queries, engine: queries.purge(engine, before), 0)

    def _read(self, run: "Callable[[ModuleType, Engine], T]", nothing: T) -> T:
        from . import queries  # noqa: PLC0415

        self._opened.wait(5.0)
        return nothing if self._engine is None else run(queries, self._engine)

    def submit(self, call: "Callable[[Engine | None], None]") -> bool:
        """Run `call` in the writer thread, with None while the file cannot be opened. It must not raise.

        Never blocks; False when the queue is full.
        """
        try:
            self._queue.put_nowait(lambda: call(self._engine))
        except queue.Full:
            return False
        return True

    async def read(self, call: "Callable[[Engine], T]", nothing: T) -> T:
        """Run `call` in a thread; `nothing` while the file cannot be read."""
        return await asyncio.to_thread(self._read, lambda _, engine: call(engine), nothing)

    def flush(self, timeout: float = 5.0) -> None:
        """Wait until everything written so far is on disk (or dropped)."""
        done = threading.Event()
        self._queue.put(done.set, timeout=timeout)
        done.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Write what is queued, then end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout)

    # ----------------------------------------------------------------- the writer thread

    def _run(self) -> None:
        self._open()
        ended = False
        while not ended:
            rows, calls, ended = self._take()
            self._insert(rows)
            for call in calls:
                call()

    def _take(self) -> tuple[list[RequestRecord], list[Callable[[], None]], bool]:
        """Block for one item, then take what else is there, so that a burst is one transaction."""
        items = [self._queue.get()]
        while len(items) < _BATCH and items[-1] is not None and not self._queue.empty():
            items.append(self._queue.get_nowait())
        rows = [item for item in items if isinstance(item, RequestRecord)]
        calls = [item for item in items if callable(item)]
        return rows, calls, None in items

    def _open(self) -> None:
        from .database import open_database  # noqa: PLC0415 - see the module's docstring

        try:
            self._engine = open_database(self.path)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, serving goes on
            log.warning("the request log %s cannot be opened: %s", self.path, error)
        self._opened.set()

    def _insert(self, rows: list[RequestRecord]) -> None:
        if not rows:
            return
        if self._engine is None:
            self._open()
        if self._engine is None:
            self._drop(len(rows), "the file cannot be opened")
            return
        try:
            self._insert_now(self._engine, rows)
        except Exception as error:  # noqa: BLE001 - full disk, locked or damaged file: drop, say, go on
            self._drop(len(rows), str(error).splitlines()[0])

    def _insert_now(self, engine: "Engine", rows: list[RequestRecord]) -> None:
        from . import queries  # noqa: PLC0415

        queries.add(engine, rows)
        self._since_trim += len(rows)
        if self._since_trim >= _TRIM_EVERY:
            self._since_trim = 0
            queries.trim(engine, self.path, self._retention_s, self._max_bytes)

    def _drop(self, count: int, why: str) -> None:
        self.dropped += count
        now = time.monotonic()
        if now - self._said_dropped >= _SAY_DROPPED_EVERY_S:
            self._said_dropped = now
            log.warning("request log: %d rows dropped so far, last because %s", self.dropped, why)
