"""Blocks of one model on disk: a thread writes them behind the engine, another one reads them ahead of it.

The engine's thread asks `has`, queues and collects; it never waits for the disk. Every failure costs a block
that is computed again.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from .block_file import (
    ADDRESS_BYTES,
    HEADER_BYTES,
    BlockAddress,
    BlockKind,
    DamagedBlock,
    read_block,
    write_block,
)
from .folder import ABOUT, PART, TURN_END, KVFolder

log = logging.getLogger("llmbox.engine")

QUEUE_BYTES: Final = 64 << 20
"""Bytes of blocks that wait to be written at most, and of blocks that were read and not taken. One block may
be larger.
"""
PAUSE_SECONDS: Final = 30.0
"""Time without writing after the disk refused it."""
STALL_SECONDS: Final = 1.0
"""Time of one read after which no further request waits for the disk."""

ReadOutcome = Literal["read", "gone", "damaged"]


@dataclass(slots=True)
class StoreCounters:
    """Counters since the store was opened."""

    written: int = 0
    written_bytes: int = 0
    refused: int = 0
    """Blocks that were not written: no room, or an error of the disk."""
    read_bytes: int = 0
    damaged: int = 0
    """Files that were removed because of their header, length or checksum, or could not be read."""


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Block that waits to be written. `data` goes back to the store's buffers then."""

    address: BlockAddress
    data: memoryview
    has_quota: bool
    """True for a block of an API key."""
    is_turn_end: bool


@dataclass(slots=True, eq=False)
class ReadJob:
    """Blocks to read in order, up to the first that cannot be read."""

    wanted: Sequence[tuple[BlockAddress, int]]
    """Addresses and bytes."""
    arrived: deque[tuple[int, ReadOutcome, memoryview | None]] = field(default_factory=deque)
    """Index in `wanted`, outcome and content, in order."""
    started: int = 0
    """Number of blocks that were begun."""
    is_ended: bool = False
    """True once nothing more arrives."""
    is_cancelled: bool = False


class BlockStore:
    """Files of one model in a `KVFolder`."""

    def __init__(
        self,
        folder: KVFolder,
        model: bytes,
        about: dict[str, Any],
        *,
        queue_bytes: int = QUEUE_BYTES,
        make_buffer: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the model's part of `folder`, which is open, and list its files. Raises OSError.

        `model`: digest of all that the bits of a block depend on. `about`: see `KVFolder.add_model`.
        `make_buffer` allocates memory that blocks are copied through.
        """
        self.folder = folder
        self.counters = StoreCounters()
        self._model, self._about = model, about
        self._path = folder.add_model(model, about)
        self._limit = queue_bytes
        self._make_buffer, self._clock = make_buffer, clock
        self._known: dict[bytes, bool] = {}
        """Files by the digest of their address, and whether they are ends of turns."""
        self._leaving: Counter[bytes] = Counter()
        """Digests of addresses that wait to be removed."""
        self._owned = folder.recount()
        self._list()
        self._changed = threading.Condition()
        self._writes: deque[BlockWrite | Callable[[], None]] = deque()
        """Blocks to write, and other changes of files, in order."""
        self._queued_bytes = self._held_bytes = 0
        self._writing = False
        self._reads: deque[ReadJob] = deque()
        self._buffers: list[memoryview] = []
        self._reading_since: float | None = None
        self._paused_until = -1.0
        self._closed = False
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._write_all, "kv-write"), (self._read_all, "kv-read"))
        ]
        for thread in self._threads:
            thread.start()

    def _list(self) -> None:
        for block in self.folder.blocks(self._path):
            if len(block.path.stem) == 2 * ADDRESS_BYTES and block.path.suffix in {"", TURN_END}:
                with contextlib.suppress(ValueError):
                    self._known[bytes.fromhex(block.path.stem)] = bool(block.path.suffix)

    # ------------------------------------------------------------------ what the engine's thread calls

    def address(self, owner: str, kind: BlockKind, block_hash: bytes) -> BlockAddress:
        return self.folder.address(owner, kind, block_hash)

    def has(self, address: BlockAddress) -> bool:
        return address.digest in self._known and address.digest not in self._leaving

    @property
    def is_paused(self) -> bool:
        """True for a while after the disk refused a block."""
        return self._clock() < self._paused_until

    @property
    def num_blocks(self) -> int:
        return len(self._known)

    @property
    def is_stalled(self) -> bool:
        """True while a read takes so long that a request should not wait for the disk."""
        since = self._reading_since
        return since is not None and self._clock() - since > STALL_SECONDS

    def accepts(self, size: int) -> bool:
        """Return True if a block may be queued now: the writer is not behind, and the disk took the last."""
        if self.is_paused:
            return False
        return self._queued_bytes == 0 or self._queued_bytes + size <= self._limit

    def take_buffer(self, size: int) -> memoryview:
        with self._changed:
            for index, buffer in enumerate(self._buffers):
                if len(buffer) == size:
                    return self._buffers.pop(index)
        return self._make_buffer(size)

    def give_back(self, buffer: memoryview, *, was_read: bool = True) -> None:
        """Take a buffer back; `was_read`: it came out of a `ReadJob`."""
        with self._changed:
            self._buffers.append(buffer)
            while sum(map(len, self._buffers)) > self._limit:
                self._buffers.pop(0)
            if was_read:
                self._held_bytes -= len(buffer)
                self._changed.notify_all()

    def write(self, write: BlockWrite) -> None:
        self._submit(write)

    def touch(self, addresses: Sequence[BlockAddress]) -> None:
        """Note that these files were used, the last one last."""
        found = [address for address in addresses if address.digest in self._known]
        if found:
            self._submit(partial(self._touch, found))

    def remove(self, addresses: Sequence[BlockAddress]) -> None:
        """Remove these blocks, also where they are queued to be written before. None is found any more."""
        with self._changed:
            self._leaving.update(address.digest for address in addresses)
        self._submit(partial(self._remove, addresses))

    def _submit(self, task: BlockWrite | Callable[[], None]) -> None:
        with self._changed:
            self._writes.append(task)
            if isinstance(task, BlockWrite):
                self._queued_bytes += len(task.data)
            self._changed.notify_all()

    def read(self, wanted: Sequence[tuple[BlockAddress, int]]) -> ReadJob:
        job = ReadJob(wanted)
        with self._changed:
            self._reads.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: ReadJob) -> None:
        with self._changed:
            job.is_cancelled = job.is_ended = True
            for _, _, data in job.arrived:
                if data is not None:
                    self._held_bytes -= len(data)
            job.arrived.clear()
            self._changed.notify_all()

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Wait until the threads have changed something that `until` sees."""
        with self._changed:
            return self._changed.wait_for(until, seconds)

    @property
    def has_written_all(self) -> bool:
        return not self._writes and not self._writing

    def close(self, seconds: float) -> None:
        """Write what is queued, for `seconds` at most, and end the threads."""
        end = time.monotonic() + seconds
        self.wait(seconds, lambda: self.has_written_all)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    # ------------------------------------------------------------------ the writer's thread

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._closed)
                if self._closed:
                    return
                task = self._writes.popleft()
                self._writing = True
            try:
                if isinstance(task, BlockWrite):
                    self._write(task)
                else:
                    task()
            except Exception:
                log.exception("a block of the KV cache cannot be written")
            finally:
                with self._changed:
                    self._writing = False
                    if isinstance(task, BlockWrite):
                        self._queued_bytes -= len(task.data)
                        self._buffers.append(task.data)
                    self._changed.notify_all()

    def _write(self, task: BlockWrite) -> None:
        address, size = task.address, HEADER_BYTES + len(task.data)
        if address.digest in self._known:
            return
        if self.is_paused:
            self.counters.refused += 1
            return
        try:
            if not self._reserve(task, size):
                self._pause("there is no room on its disk, or within cache.kv_disk_gb")
                return
            try:
                self._store(task)
            except OSError:
                self.folder.release(size)
                raise
        except OSError as error:
            self._pause(error.strerror or str(error))
            return
        self._paused_until = -1.0
        self._known[address.digest] = task.is_turn_end
        self._owned[address.owner] = self._owned.get(address.owner, 0) + size
        self.counters.written += 1
        self.counters.written_bytes += size

    def _reserve(self, task: BlockWrite, size: int) -> bool:
        owner = task.address.owner
        is_over = task.has_quota and self._owned.get(owner, 0) + size > self.folder.key_bytes
        reserved = self.folder.reserve(size, owner if is_over else "")
        if is_over:
            self._owned = self.folder.recount()
        return reserved

    def _store(self, task: BlockWrite) -> None:
        address = task.address
        folder = self._path / address.owner
        path = folder / (address.file_name + (TURN_END if task.is_turn_end else ""))
        part = folder / f"{address.file_name}{PART}"
        try:
            write_block(path, part, address, self._model, task.data)
        except FileNotFoundError:  # a caller's first block, or its folder was purged
            if not (self._path / ABOUT).exists():
                self.folder.add_model(self._model, self._about)
            folder.mkdir(mode=0o700, exist_ok=True)
            write_block(path, part, address, self._model, task.data)

    def _pause(self, reason: str) -> None:
        self.counters.refused += 1
        if self._paused_until < 0:
            log.warning("the KV cache on disk takes no new blocks for now (%s): %s", reason, self.folder.root)
        self._paused_until = self._clock() + PAUSE_SECONDS

    def _touch(self, addresses: Sequence[BlockAddress]) -> None:
        now = time.time_ns() - len(addresses)
        for number, address in enumerate(addresses):
            try:
                os.utime(self._file(address), ns=(now + number, now + number))
            except FileNotFoundError:  # evicted: to be written again when it is computed again
                self._known.pop(address.digest, None)
            except OSError:
                continue

    def _remove(self, addresses: Sequence[BlockAddress]) -> None:
        for address in addresses:
            if address.digest in self._known:
                path = self._file(address)
                self._known.pop(address.digest, None)
                self._drop(path)
        with self._changed:
            self._leaving -= Counter(address.digest for address in addresses)

    def _file(self, address: BlockAddress) -> Path:
        suffix = TURN_END if self._known.get(address.digest) else ""
        return self._path / address.owner / (address.file_name + suffix)

    # ------------------------------------------------------------------ the reader's thread

    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._reads and self._may_read()) or self._closed)
                if self._closed:
                    return
                job = self._reads.popleft()
                if job.is_ended:
                    continue
                address, size = job.wanted[job.started]
                self._held_bytes += size
                self._reading_since = self._clock()
            data = self.take_buffer(size)
            try:
                outcome = self._read(address, data)
            except Exception:
                log.exception("a block of the KV cache cannot be read")
                outcome = "damaged"
            with self._changed:
                self._reading_since = None
                if outcome != "read" or job.is_cancelled:
                    self._held_bytes -= size
                    self._buffers.append(data)
                if not job.is_cancelled:
                    job.arrived.append((job.started, outcome, data if outcome == "read" else None))
                    job.started += 1
                    job.is_ended = outcome != "read" or job.started == len(job.wanted)
                    if not job.is_ended:
                        self._reads.append(job)  # jobs take turns
                self._changed.notify_all()

    def _may_read(self) -> bool:
        return self._held_bytes == 0 or self._held_bytes < self._limit

    def _read(self, address: BlockAddress, data: memoryview) -> ReadOutcome:
        path = self._file(address)
        try:
            read_block(path, address, self._model, data)
        except FileNotFoundError:  # evicted by another engine, or removed by hand
            self._known.pop(address.digest, None)
            return "gone"
        except (DamagedBlock, OSError) as damage:
            self._known.pop(address.digest, None)
            self.counters.damaged += 1
            log.warning("a block of the KV cache on disk is dropped and computed again, %s: %s", damage, path)
            self._drop(path)
            return "damaged"
        self.counters.read_bytes += len(data)
        return "read"

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self.folder.release(size)
