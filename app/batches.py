"""Batch runner: runs a bounded number of requests at once, until each has an answer, the batch is cancelled
or expires.

A request that was in progress when the daemon stopped runs again after the next start.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import ApiError
from .store.batches import Batch, BatchItem, BatchKind, BatchStore
from .store.record import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
_READ_AT_ONCE = 64
_RETRIED = {429, 503}
"""Status codes of a busy, loading or draining daemon: the request is retried later."""
_MOST_503 = 12
"""Tries until a failing model load counts as the request's answer: about 8 minutes."""
_LONGEST_PAUSE_S = 60.0
_DISK_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteAnswer:
    """HTTP answer of a route to a request of a batch."""

    status: int
    body: bytes
    request_id: str = ""
    retry_after: float | None = None
    """Seconds."""


SendRequest = Callable[[str, bytes, str], Awaitable[RouteAnswer]]
"""Sends a request: (path, JSON body, owner) to an answer, as if the owner had sent it over HTTP."""


class BatchRunner:
    """Use it only from the daemon's event loop. Every awaited method may raise StoreError."""

    def __init__(self, store: BatchStore, *, most_at_once: int, most_bytes: int) -> None:
        """`most_bytes`: limit of the requests and answers of all batches of an owner."""
        self.store = store
        self._most_bytes = most_bytes
        self._most_at_once = most_at_once
        self._slots = asyncio.Semaphore(most_at_once)
        self._send: SendRequest | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._resuming: asyncio.Task[None] | None = None

    def start(self, send: SendRequest) -> None:
        """Resume the batches of an earlier daemon, and accept new ones."""
        self._send = send
        self._resuming = asyncio.create_task(self._resume())

    async def create(
        self,
        kind: BatchKind,
        owner: str,
        id_prefix: str,
        items: Sequence[BatchItem],
        *,
        details: Mapping[str, Any] | None = None,
        seconds: float = 86_400,
    ) -> Batch:
        """Store a batch and begin it. After `seconds`, requests without an answer expire. Raises ApiError
        400.
        """
        size = sum(len(item.body) for item in items)
        kept = await self.store.size(owner)
        if kept + size > self._most_bytes:
            raise ApiError(
                400,
                f"Your batches hold {kept} bytes, and this one {size}: more than {self._most_bytes} "
                "(requests.batch_bytes). Delete some that have ended.",
                code="batch_storage_full",
                param="requests",
            )
        now = time.time()
        batch = await self.store.add(
            Batch(
                kind=kind,
                owner=owner,
                id=id_prefix + secrets.token_hex(12),
                created=now,
                expires=now + seconds,
                total=len(items),
                details=details or {},
            ),
            items,
        )
        self._begin(batch)
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Cancel the requests without an answer. Does nothing to a batch that has ended."""
        await self.store.end(batch.seq, "cancelled")
        await self._stop(batch.seq)

    async def delete(self, batch: Batch) -> None:
        await self._stop(batch.seq)
        await self.store.delete(batch.kind, batch.owner, batch.id)

    async def close(self) -> None:
        """Stop. Requests without an answer run again after the next start."""
        tasks = [*self._running.values(), *([self._resuming] if self._resuming else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _resume(self) -> None:
        for batch in await self.store.unfinished():
            self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        if batch.seq in self._running or self._send is None:
            return
        task = asyncio.create_task(self._run(batch, self._send))
        self._running[batch.seq] = task
        task.add_done_callback(lambda _: self._running.pop(batch.seq, None))

    async def _stop(self, seq: int) -> None:
        task = self._running.get(seq)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    async def _run(self, batch: Batch, send: SendRequest) -> None:
        try:
            async with asyncio.timeout(max(0.0, batch.expires - time.time())):
                await self._run_items(batch, send)
        except TimeoutError:
            with contextlib.suppress(StoreError):
                await self.store.end(batch.seq, "expired")
        except Exception:
            log.exception("batch %s stops until the next start", batch.id)

    async def _run_items(self, batch: Batch, send: SendRequest) -> None:
        """Requests that wait to be tried again count for their batch alone, not for those of other keys."""
        after = 0
        places = asyncio.Semaphore(self._most_at_once)
        async with asyncio.TaskGroup() as group:
            while items := await self._read(batch, after):
                for item in items:
                    await places.acquire()
                    task = group.create_task(self._answer(batch, item, send))
                    task.add_done_callback(lambda _: places.release())
                after = items[-1].seq

    async def _read(self, batch: Batch, after: int) -> list[BatchItem]:
        return await _patiently(lambda: self.store.pending(batch.seq, after, _READ_AT_ONCE))

    async def _answer(self, batch: Batch, item: BatchItem, send: SendRequest) -> None:
        tries = 0
        while True:
            async with self._slots:
                answer = await send(item.path, item.body, batch.owner)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise asyncio.CancelledError  # shutting down: the error is not the request's answer
            tries += answer.status == 503
            if answer.status not in _RETRIED or tries >= _MOST_503:
                break
            await asyncio.sleep(min(_LONGEST_PAUSE_S, max(answer.retry_after or 1.0, 2.0**tries)))
        await _patiently(lambda: self.store.record(item.seq, answer.status, answer.request_id, answer.body))


async def _patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Retry while the disk is full or busy: an answer took work, so retry for as long as the daemon runs."""
    while True:
        try:
            return await call()
        except StoreError as error:
            log.warning("a batch waits for the disk: %s", error)
            await asyncio.sleep(_DISK_PAUSE_S)
