"""Request log: writing and reading.

Writes go through a bounded queue to one thread that owns the only writing connection. When the disk is full,
the file locked or the queue long, rows are dropped, counted and logged: serving never waits.

That thread imports SQLAlchemy some seconds after the start, or at the first read: the API, the first model
and its first answer come first.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from . import queries as sql
from .record import (
    Content,
    ContentBudget,
    ContentDraft,
    RecordFilter,
    RequestRecord,
    StoreError,
    first_line,
    make_content,
)
from .trimming import Retention, Trimmer

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from .queries.requests import Entry, What

log = logging.getLogger(__name__)

_QUEUE_LIMIT = 10_000
_QUEUED_CONTENT = 32 << 20  # bytes of prompts and answers that may wait for the disk
_BATCH = 500
_ROW_BYTES = 400  # of a row without content, roughly
_OPEN_AFTER_S = 3.0  # unless a read comes first: importing SQLAlchemy blocks other threads
_OPENS_WITHIN_S = 15.0  # from then on, on a busy machine
_ASK_S = 60.0
_CATCH_UP_S = 0.5
"""Limit of the wait of a search for rows that were queued before it."""
_SAY_DROPPED_EVERY_S = 60.0
T = TypeVar("T")
_Item = tuple[RequestRecord, ContentDraft | None, Sequence[bytes]]


def _warn(why: str) -> None:
    log.warning("a change of the request log failed: %s", why)


class RequestLog:
    """The log. Open it with `start()`, close it with `close()`; `write` may be called from any thread at any
    time.
    """

    def __init__(self, path: Path, keep: Retention | None = None, *, content_bytes: int = 256_000) -> None:
        self.path = path
        self.dropped = 0
        self.keep = keep or Retention()
        self.content_bytes = content_bytes
        """Maximum bytes kept of a prompt, of an answer and of a request's body."""
        self._trimmer = Trimmer(path, self.keep)
        self._queue: queue.Queue[_Item | Callable[[], None] | None] = queue.Queue(_QUEUE_LIMIT)
        self._room = ContentBudget(_QUEUED_CONTENT)
        self._engine: Engine | None = None
        self.problem = ""
        """Reason why the file cannot be opened: no row is kept meanwhile."""
        self._wanted = threading.Event()
        """Set by readers that wait for the file to be open."""
        self._opened = threading.Event()
        self._said_dropped = -_SAY_DROPPED_EVERY_S
        self._discards = False
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def discard_all(self) -> None:
        """Discard everything that is written from now on; call it instead of `start`."""
        self._discards = True

    def write(
        self, record: RequestRecord, content: ContentDraft | None = None, times: Sequence[bytes] = ()
    ) -> None:
        """Queue one row. Never blocks; drops and counts it when the queue is full.

        Content for which there is no room is left out; `record.content` then says so. `times`: encoded
        `SequenceRecord`s.
        """
        if self._discards:
            return
        if content is not None and not self._room.take(content.size):
            record, content = replace(record, content="dropped"), None
        try:
            self._queue.put_nowait((record, content, times))
        except queue.Full:
            self._room.give_back(content.size if content is not None else 0)
            self.drop(1, "the queue is full")

    def write_times(self, record: RequestRecord, times: Sequence[bytes]) -> None:
        """Queue the times of a row that was written without. Never blocks; they are lost where `write` would
        lose the row.
        """
        if not self._discards:
            self.submit(
                lambda engine: sql.requests.add_times(engine, record, times),
                sum(map(len, times)),
                failed=lambda why: log.warning("the times of %s were not kept: %s", record.id, why),
            )

    async def get_times(self, request_id: str) -> list[bytes]:
        """Get the encoded times of a request's sequences, in the order of their ends, after everything that
        was written before. Raises StoreError.
        """
        return await self.ask(lambda engine: sql.requests.times_of(engine, request_id))

    async def query(self, want: RecordFilter) -> list[tuple[int, RequestRecord]]:
        """Return (sequence number, record), newest first. Raises StoreError.

        Rows queued before are among them, unless the writer is held up.
        """
        return await asyncio.to_thread(self._find, want)

    async def get(self, request_id: str) -> RequestRecord | None:
        """Get one record. Raises StoreError."""
        found = await self.get_with_content(request_id)
        return None if found is None else found[0]

    async def get_with_content(self, request_id: str) -> tuple[RequestRecord, Content | None] | None:
        """Get one record with its content. The caller checks whether the content may be shown. Raises
        StoreError.
        """
        return await asyncio.to_thread(self._read, lambda engine: sql.requests.get(engine, request_id))

    async def earlier_contents(self, record: RequestRecord) -> list[tuple[str, Content]]:
        """Get (request id, content) of the latest requests of the owner and model of `record` before it,
        newest first. Raises StoreError.
        """
        return await asyncio.to_thread(self._read, lambda engine: sql.requests.earlier(engine, record))

    async def purge(self, before: float, what: "What" = "requests") -> int:
        """Erase data created before a Unix time. Returns the number of rows, contents and stored answers.

        Waits for queued writes and for the disk. Raises StoreError unless everything was erased.
        """
        return await self.ask(lambda engine: sql.requests.purge(engine, self.path, before, what))

    async def ask(self, call: "Callable[[Engine], T]") -> T:
        """Run `call` in the writer thread, after everything written before. Raises StoreError.

        It runs even if the caller is cancelled.
        """
        done: Future[T] = Future()
        self._wanted.set()
        if not self.submit(
            lambda engine: done.set_result(call(engine)),
            failed=lambda why: done.set_exception(StoreError(why)),
        ):
            raise StoreError("the queue of the request log is full; try again")
        try:
            # A cancelled future takes no result: setting one would end the writer thread.
            async with asyncio.timeout(_ASK_S):
                return await asyncio.shield(asyncio.wrap_future(done))
        except TimeoutError:
            raise StoreError("the request log is still busy; the operation runs later") from None

    def submit(
        self, call: "Callable[[Engine], object]", size: int = 0, *, failed: Callable[[str], None] = _warn
    ) -> bool:
        """Run `call` in the writer thread. `failed` gets the reason there if the file cannot be opened, or if
        `call` raised.

        `size`: bytes that it holds while it waits. Never blocks; returns False when the queue is full.
        """
        if not self._room.take(size):
            return False

        def run() -> None:
            try:
                if self._engine is None:
                    raise StoreError(f"the request log cannot be opened: {self.problem}")  # noqa: TRY301
                call(self._engine)
            except Exception as error:  # noqa: BLE001 - it would end the writer thread
                failed(first_line(error))
            finally:
                self._room.give_back(size)

        try:
            self._queue.put_nowait(run)
        except queue.Full:
            self._room.give_back(size)
            return False
        return True

    def drop(self, count: int, why: str) -> None:
        """Count rows that were lost, and log it. May be called from any thread."""
        self.dropped += count
        now = time.monotonic()
        if now - self._said_dropped >= _SAY_DROPPED_EVERY_S:
            self._said_dropped = now
            log.warning("request log: %d rows dropped so far, last because %s", self.dropped, why)

    def wrote(self, size: int) -> None:
        """Count written bytes. Called from the writer thread."""
        self._trimmer.wrote(size)

    async def read(self, call: "Callable[[Engine], T]", nothing: T, what: str) -> T:
        """Run `call` in a thread. Returns `nothing` if the file cannot be opened, or if it is locked or
        damaged, which the log says: pages show the rest. `what`: what is read.
        """

        def run() -> T:
            try:
                return self._read(call) if self._is_open() else nothing
            except Exception as error:  # noqa: BLE001 - see above
                log.warning("%s cannot be read from the request log: %s", what, first_line(error))
                return nothing

        return await asyncio.to_thread(run)

    def flush(self, timeout: float = 60.0) -> None:
        """Wait until everything written so far is on disk (or dropped)."""
        done = threading.Event()
        self._wanted.set()
        self._queue.put(done.set, timeout=timeout)
        done.wait(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Write the queue, then end the thread."""
        if self._thread.is_alive():
            self._wanted.set()
            self._queue.put(None)
            self._thread.join(timeout)

    def _find(self, want: RecordFilter) -> list[tuple[int, RequestRecord]]:
        if self._is_open() and self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self.flush(_CATCH_UP_S)
        return self._read(lambda engine: sql.requests.find(engine, want))

    def _is_open(self) -> bool:
        self._wanted.set()
        self._opened.wait(_OPENS_WITHIN_S)
        return self._engine is not None

    def _read(self, run: "Callable[[Engine], T]") -> T:
        if not self._is_open() or self._engine is None:
            raise StoreError(f"the file cannot be opened: {self.problem}")
        # Imported already: two threads that import SQLAlchemy at once may find half a module.
        from sqlalchemy.exc import DatabaseError  # noqa: PLC0415

        try:
            return run(self._engine)
        except DatabaseError as error:
            raise StoreError(first_line(error)) from error

    # ----------------------------------------------------------------- the writer thread

    def _run(self) -> None:
        self._wanted.wait(_OPEN_AFTER_S)
        self._open()
        ended = False
        while not ended:
            rows, calls, ended = self._take()
            self._insert(rows)
            for call in calls:
                call()
            if not ended:
                self._trimmer.trim(self._engine)

    def _take(self) -> tuple[list[_Item], list[Callable[[], None]], bool]:
        """Block for one item, then take everything else in the queue, so that a burst is one transaction.

        Returns nothing when it is time to trim.
        """
        try:
            items = [self._queue.get(timeout=self._trimmer.wait_s())]
        except queue.Empty:
            return [], [], False
        while len(items) < _BATCH and items[-1] is not None and not self._queue.empty():
            items.append(self._queue.get_nowait())
        rows = [item for item in items if isinstance(item, tuple)]
        calls = [item for item in items if callable(item)]
        return rows, calls, None in items

    def _open(self) -> None:
        from .database import open_database  # noqa: PLC0415 - see the module's docstring

        self._engine, self.problem = None, ""
        try:
            self._engine = open_database(self.path)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the file, serving goes on
            reason = getattr(error, "orig", error)  # without SQLAlchemy's lines on where to read more
            self.problem = str(reason)
            log.warning("the request log %s cannot be opened: %s", self.path, reason)
        self._opened.set()

    def _insert(self, rows: list[_Item]) -> None:
        if not rows:
            return
        if self._engine is None:
            self._open()
        entries = [self._entry(*row) for row in rows]
        try:
            self._insert_now(entries)
        except Exception as error:  # noqa: BLE001 - full disk, locked or damaged file: drop, say, go on
            if not self._retry_insert(entries, error):
                self.drop(len(rows), first_line(error))

    def _entry(self, record: RequestRecord, draft: ContentDraft | None, times: Sequence[bytes]) -> "Entry":
        if draft is None:
            return record, None, times
        try:
            return record, make_content(draft, self.content_bytes), times
        except Exception:
            log.exception("what %s asked and got cannot be kept", record.id)
            return replace(record, content="dropped"), None, times
        finally:
            self._room.give_back(draft.size)

    def _insert_now(self, entries: "Sequence[Entry]") -> None:
        if self._engine is None:
            raise StoreError("the file cannot be opened")
        sql.requests.add(self._engine, entries)
        kept = (content for _, content, _ in entries if content is not None)
        self.wrote(sum(_ROW_BYTES + sum(map(len, times)) for _, _, times in entries))
        self.wrote(sum(c.body_bytes + c.prompt_bytes + c.output_bytes for c in kept))

    def _retry_insert(self, entries: "list[Entry]", error: Exception) -> bool:
        """Retry a failed insert. A damaged file is replaced by a new one; a disk too full for contents may
        have room for rows.
        """
        from .database import is_damage, set_aside  # noqa: PLC0415

        try:
            if is_damage(error):
                set_aside(self.path)
                self._open()
            elif "full" in str(error) and any(content for _, content, _ in entries):
                entries = [
                    (replace(row, content=row.content and "dropped"), None, times)
                    for row, _, times in entries
                ]
            else:
                return False
            self._insert_now(entries)
        except Exception:  # noqa: BLE001 - the first error is reported
            return False
        return True
