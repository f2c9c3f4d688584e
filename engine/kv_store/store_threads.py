"""Threads of a store: one writes blocks behind the engine, one reads them ahead of it, over few buffers."""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from .block_file import HEADER_BYTES, BlockAddress, DamagedBlock, read_block

if TYPE_CHECKING:
    from .store import ModelFiles

log = logging.getLogger("llmbox.engine")

BUFFER_BYTES: Final = 32 << 20
"""Bytes of blocks that wait to be written at most, and of blocks that were read and not taken. One block may
be larger. Buffers take twice as much together (`MemoryPlan.buffer_bytes`).
"""
FIRST_SECONDS_PER_BYTE: Final = 1e-9
"""Processor time of writing a file, until some were written."""
PAUSE_SECONDS: Final = 30.0
"""Time without writing after the disk refused it."""
STALL_SECONDS: Final = 1.0
"""Time of one read after which no further request waits for the disk."""

ReadOutcome = Literal["read", "gone", "damaged"]


class BlockBuffers:
    """Buffers that are used again, as long as all together take `limit` bytes at most."""

    def __init__(self, make: Callable[[int], memoryview], limit: int) -> None:
        """`make` allocates a buffer."""
        self._make, self._limit = make, limit
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._bytes = 0
        """Bytes of all buffers, free and used."""

    def take(self, size: int) -> memoryview:
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):  # the last one is still in CPU caches
                if len(self._free[index]) == size:
                    return self._free.pop(index)
            self._bytes += size
            self._shrink()
            try:
                return self._make(size)  # with the lock: `make` need not expect two threads
            except BaseException:
                self._bytes -= size
                raise

    def give_back(self, buffer: memoryview) -> None:
        with self._lock:
            self._free.append(buffer)
            self._shrink()

    def _shrink(self) -> None:
        while self._free and self._bytes > self._limit:
            self._bytes -= len(self._free.pop(0))


class StoreThread:
    """Thread of a `BlockStore`, and what it shares with the store."""

    def __init__(
        self,
        files: "ModelFiles",
        buffers: BlockBuffers,
        changed: threading.Condition,
        limit: int,
        clock: Callable[[], float],
    ) -> None:
        """`changed` is notified of every change. `limit`: bytes that wait for somebody at most."""
        self._files, self._buffers = files, buffers
        self._changed, self._limit, self._clock = changed, limit, clock
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def close(self) -> None:
        """Have the thread end after what it does. To be called with `changed` held."""
        self._is_closed = True

    def _run(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Block that waits to be written. `data` goes back to the store's buffers then."""

    address: BlockAddress
    data: memoryview
    has_quota: bool
    """True for a block of an API key."""
    is_turn_end: bool


class StoreWriter(StoreThread):
    """Queue of one `BlockStore`. Every failure costs a block that is computed again."""

    def __init__(self, *means: Any) -> None:
        super().__init__(*means)
        self._tasks: deque[BlockWrite | Callable[[], None]] = deque()
        self._queued_bytes = 0
        self._is_busy = False
        self._paused_until = -1.0
        self.seconds_per_byte = FIRST_SECONDS_PER_BYTE
        """Processor time that the last files took to write."""
        self._owned: dict[str, int] | None = None
        """Bytes of each caller, once one may have reached the share of a key."""

    # ------------------------------------------------------------------ what the engine's thread calls

    @property
    def is_paused(self) -> bool:
        """True for a while after the disk refused a block."""
        return self._clock() < self._paused_until

    @property
    def is_idle(self) -> bool:
        return not self._tasks and not self._is_busy

    def accepts(self, size: int, copying: int) -> bool:
        """See `BlockStore.accepts`."""
        if self.is_paused:
            return False
        before = self._queued_bytes + copying
        return before == 0 or before + size <= self._limit

    def submit(self, task: BlockWrite | Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            if isinstance(task, BlockWrite):
                self._queued_bytes += len(task.data)
            self._changed.notify_all()

    def touch(self, addresses: Sequence[BlockAddress]) -> None:
        """Note that these files were used, the last one last."""
        found = [address for address in addresses if address in self._files]
        if found:
            self.submit(partial(self._touch, found))

    def remove(self, addresses: Sequence[BlockAddress]) -> None:
        """Remove these blocks, also where they are queued to be written before. None is found any more."""
        with self._changed:
            self._files.leaving.update(address.digest for address in addresses)
        self.submit(partial(self._remove, addresses))

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._tasks and self._files.is_listed) or self._is_closed)
                if self._is_closed:
                    return
                task = self._tasks.popleft()
                self._is_busy = True
            try:
                if isinstance(task, BlockWrite):
                    self._write(task)
                else:
                    task()
            except Exception:
                log.exception("a block of the KV cache cannot be written")
            finally:
                if isinstance(task, BlockWrite):
                    self._buffers.give_back(task.data)
                with self._changed:
                    self._is_busy = False
                    if isinstance(task, BlockWrite):
                        self._queued_bytes -= len(task.data)
                    self._changed.notify_all()

    def _write(self, task: BlockWrite) -> None:
        files, size, began = self._files, HEADER_BYTES + len(task.data), time.thread_time()
        if task.address in files:
            return
        if self.is_paused:
            files.counters.refused += 1
            return
        try:
            if not self._reserve(task, size):
                self._pause("there is no room on its disk, or within cache.kv_disk_gb")
                return
            try:
                files.write(task.address, task.data, is_turn_end=task.is_turn_end)
            except OSError:
                files.folder.release(size)
                raise
        except OSError as error:
            self._pause(error.strerror or str(error))
            return
        self._paused_until = -1.0
        if self._owned is not None:
            self._owned[task.address.owner] = self._owned.get(task.address.owner, 0) + size
        self.seconds_per_byte += 0.1 * ((time.thread_time() - began) / size - self.seconds_per_byte)
        files.counters.written += 1
        files.counters.written_bytes += size

    def _reserve(self, task: BlockWrite, size: int) -> bool:
        folder, owner = self._files.folder, task.address.owner
        is_over = False
        if task.has_quota:
            if self._owned is None and folder.usage() + size > folder.key_bytes:
                self._owned = folder.recount()
            is_over = self._owned is not None and self._owned.get(owner, 0) + size > folder.key_bytes
        reserved = folder.reserve(size, owner if is_over else "")
        if is_over:
            self._owned = folder.recount()
        return reserved

    def _pause(self, reason: str) -> None:
        self._files.counters.refused += 1
        if self._paused_until < 0:
            root = self._files.folder.root
            log.warning("the KV cache on disk takes no new blocks for now (%s): %s", reason, root)
        self._paused_until = self._clock() + PAUSE_SECONDS

    def _touch(self, addresses: Sequence[BlockAddress]) -> None:
        now = time.time_ns() - len(addresses)
        for number, address in enumerate(addresses):
            try:
                os.utime(self._files.path(address), ns=(now + number, now + number))
            except FileNotFoundError:  # evicted: to be written again when it is computed again
                self._files.forget(address)
            except OSError:
                continue

    def _remove(self, addresses: Sequence[BlockAddress]) -> None:
        for address in addresses:
            if address in self._files:
                self._files.remove(address)
        with self._changed:
            self._files.leaving -= Counter(address.digest for address in addresses)


@dataclass(slots=True, eq=False)
class ReadJob:
    """Blocks to read in order, up to the first that cannot be read. Without blocks it ends once the files
    are listed.
    """

    wanted: Sequence[tuple[BlockAddress, int]]
    """Addresses and bytes."""
    arrived: deque[tuple[int, ReadOutcome, memoryview | None]] = field(default_factory=deque)
    """Index in `wanted`, outcome and content, in order."""
    started: int = 0
    """Number of blocks that were begun."""
    is_ended: bool = False
    """True once nothing more arrives."""
    is_cancelled: bool = False


class StoreReader(StoreThread):
    """Queue of one `BlockStore`."""

    def __init__(self, *means: Any) -> None:
        super().__init__(*means)
        self._jobs: deque[ReadJob] = deque()
        self._held_bytes = 0
        self._reading_since: float | None = None

    # ------------------------------------------------------------------ what the engine's thread calls

    @property
    def is_stalled(self) -> bool:
        """True while a read takes so long that a request should not wait for the disk."""
        since = self._reading_since
        return since is not None and self._clock() - since > STALL_SECONDS

    def submit(self, job: ReadJob) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def cancel(self, job: ReadJob) -> None:
        with self._changed:
            job.is_cancelled = job.is_ended = True
            for _, _, data in job.arrived:
                if data is not None:
                    self._held_bytes -= len(data)
                    self._buffers.give_back(data)
            job.arrived.clear()
            self._changed.notify_all()

    def release(self, size: int) -> None:
        """Note that the content of a job was taken. To be called with `changed` held."""
        self._held_bytes -= size

    # ------------------------------------------------------------------ its thread

    def _run(self) -> None:
        self._reading_since = self._clock()
        self._files.list()
        self._reading_since = None
        with self._changed:
            self._changed.notify_all()
        while (job := self._next_job()) is not None:
            if job.is_ended or not job.wanted:
                with self._changed:
                    job.is_ended = True
                    self._changed.notify_all()
                continue
            self._read_next(job)

    def _next_job(self) -> ReadJob | None:
        with self._changed:
            self._changed.wait_for(lambda: (self._jobs and self.may_read) or self._is_closed)
            return None if self._is_closed else self._jobs.popleft()

    @property
    def may_read(self) -> bool:
        """False once the blocks that nobody has taken fill the buffers."""
        return self._held_bytes == 0 or self._held_bytes < self._limit

    def _read_next(self, job: ReadJob) -> None:
        address, size = job.wanted[job.started]
        with self._changed:
            self._held_bytes += size
            self._reading_since = self._clock()
        data: memoryview | None = None
        outcome: ReadOutcome = "damaged"
        try:
            data = self._buffers.take(size)
            outcome = self._read(address, data)
        except Exception:
            log.exception("a block of the KV cache cannot be read")
            self._files.forget(address)  # nobody asks for it again before it is written again
        with self._changed:
            self._reading_since = None
            if outcome != "read" or job.is_cancelled:
                self._held_bytes -= size
                if data is not None:
                    self._buffers.give_back(data)
            if not job.is_cancelled:
                job.arrived.append((job.started, outcome, data if outcome == "read" else None))
                job.started += 1
                job.is_ended = outcome != "read" or job.started == len(job.wanted)
                if not job.is_ended:
                    self._jobs.append(job)  # jobs take turns
            self._changed.notify_all()

    def _read(self, address: BlockAddress, data: memoryview) -> ReadOutcome:
        path = self._files.path(address)
        try:
            read_block(path, address, self._files.model, data, self._files.checksums)
        except FileNotFoundError:  # evicted by another engine, or removed by hand
            self._files.forget(address)
            return "gone"
        except (DamagedBlock, OSError) as damage:
            self._files.counters.damaged += 1
            log.warning("a block of the KV cache on disk is dropped and computed again, %s: %s", damage, path)
            self._files.remove(address)
            return "damaged"
        self._files.counters.read_bytes += len(data)
        return "read"
