"""Batch store: requests that run in the background, with their answers. Importable without SQLAlchemy.

Every change goes through the request log's writer thread: recorded answers survive the daemon.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from . import queries as sql
from .writer import RequestLog

log = logging.getLogger(__name__)

BatchKind = Literal["anthropic", "openai"]
ItemStatus = Literal["pending", "done", "cancelled", "expired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchItem:
    """One request of a batch."""

    custom_id: str
    path: str
    """Route that answers it, such as `/v1/messages`."""
    body: bytes
    """JSON body."""
    seq: int = 0
    """Row number; grows within a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Result of one request of a batch."""

    custom_id: str
    seq: int
    status: ItemStatus
    http_status: int
    """0 without an answer."""
    request_id: str
    answer: bytes
    """JSON, as the route answered; empty without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """Number of requests of a batch by status."""

    pending: int = 0
    succeeded: int = 0
    """Requests answered with 200."""
    failed: int = 0
    """Requests answered with an error."""
    cancelled: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch. Times are Unix seconds. Only its owner can find it."""

    kind: BatchKind
    owner: str
    """Id of the key that created it; empty for callers without one."""
    id: str
    created: float
    expires: float
    """Expiry: requests without an answer by then get none."""
    ended: float | None = None
    cancelled: float | None = None
    total: int
    details: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the dialect that created it; JSON values."""
    counts: BatchCounts = BatchCounts()
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPage:
    """Page of batches to list, newest first."""

    kind: BatchKind
    owner: str
    after: str = ""
    """Batch id: list only older ones."""
    before: str = ""
    """Batch id: list only newer ones, those next to it."""
    limit: int = 20


class BatchStore:
    """Use it only from the daemon's event loop. Every awaited method may raise StoreError."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    async def add(self, batch: Batch, items: Sequence[BatchItem]) -> Batch:
        return await self._log.ask(lambda engine: sql.batches.add(engine, batch, items))

    async def get(self, kind: BatchKind, owner: str, id_: str) -> Batch | None:
        return await self._log.ask(lambda engine: sql.batches.get(engine, kind, owner, id_))

    async def find(self, page: BatchPage) -> list[Batch] | None:
        """List a page, and one more batch if there is a next page. None: there is no batch `after` or
        `before`.
        """
        return await self._log.ask(lambda engine: sql.batches.find(engine, page))

    async def pending(self, batch: int, after: int, limit: int) -> list[BatchItem]:
        """Requests without an answer that follow the row number `after`."""
        return await self._log.ask(lambda engine: sql.batches.pending(engine, batch, after, limit))

    async def record(self, item: int, http_status: int, request_id: str, answer: bytes) -> None:
        """Store an answer; the last one ends its batch. Does nothing to a request that is no longer
        pending.
        """
        text = answer.decode("utf-8", "replace")
        await self._log.ask(
            lambda engine: self._log.wrote(sql.batches.record(engine, item, http_status, request_id, text))
        )

    async def end(self, batch: int, status: Literal["cancelled", "expired"]) -> None:
        """End a batch: pending requests get `status`."""
        await self._log.ask(lambda engine: sql.batches.end(engine, batch, status))

    async def results(self, batch: int, after: int, limit: int) -> list[BatchResult]:
        return await self._log.ask(lambda engine: sql.batches.results(engine, batch, after, limit))

    async def result_sizes(self, batch: int) -> list[tuple[BatchResult, int]]:
        """Get all results without their answers, each with the bytes of its answer."""
        return await self._log.ask(lambda engine: sql.batches.result_sizes(engine, batch))

    async def delete(self, kind: BatchKind, owner: str, id_: str) -> bool:
        """Delete a batch and overwrite its bytes. Returns False if there is no such batch."""
        return await self._log.ask(lambda engine: sql.batches.delete(engine, kind, owner, id_))

    async def size(self, owner: str) -> int:
        """Bytes of requests and answers."""
        return await self._log.ask(lambda engine: sql.batches.size(engine, owner))

    async def unfinished(self) -> list[Batch]:
        """Batches that have not ended. Waits until the file is opened for another reason."""
        found: Future[list[Batch]] = Future()

        def give_up(why: str) -> None:  # new batches run all the same
            log.warning("batches of an earlier start cannot be read: %s", why)
            found.set_result([])

        if not self._log.submit(
            lambda engine: found.set_result(sql.batches.unfinished(engine)), failed=give_up
        ):
            return []
        return await asyncio.shield(asyncio.wrap_future(found))  # the writer thread sets it, come what may
