"""Blocks of one model on disk: a thread writes them behind the engine, another one reads them ahead of it.

The engine's thread asks `has`, queues and collects; it never waits for the disk. Every failure costs a block
that is computed again.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .block_file import ADDRESS_BYTES, BlockAddress, BlockKind, Checksums, write_block, zlib_checksums
from .folder import ABOUT, KVFolder
from .store_threads import BUFFER_BYTES, BlockBuffers, BlockWrite, ReadJob, StoreReader, StoreWriter
from .usage import PART, TURN_END

_DIGITS: Final = 2 * ADDRESS_BYTES


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


class ModelFiles:
    """Index of the files, by the digests of their addresses. The reader's thread fills it from the names
    alone: no file is opened, and no status is read.
    """

    def __init__(
        self,
        folder: KVFolder,
        model: bytes,
        about: dict[str, Any],
        checksums: Checksums = zlib_checksums,
    ) -> None:
        self.folder = folder
        self.model = model
        self.checksums = checksums
        self.counters = StoreCounters()
        self.is_listed = False
        self.leaving: Counter[bytes] = Counter()
        """Digests of addresses that wait to be removed."""
        self._about = about
        self._root = folder.add_model(model, about)
        self._is_turn_end: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._is_turn_end)

    def __contains__(self, address: BlockAddress) -> bool:
        return address.digest in self._is_turn_end

    def list(self) -> None:
        """Fill the index. A folder that cannot be listed counts as empty."""
        for owner in _names(self._root):
            for name in _names(self._root / owner):
                suffix = name[_DIGITS:]
                if suffix in {"", TURN_END}:
                    with contextlib.suppress(ValueError):
                        self._is_turn_end[bytes.fromhex(name[:_DIGITS])] = bool(suffix)
        self.is_listed = True

    def path(self, address: BlockAddress) -> Path:
        suffix = TURN_END if self._is_turn_end.get(address.digest) else ""
        return self._root / address.owner / (address.file_name + suffix)

    def write(self, address: BlockAddress, data: memoryview, *, is_turn_end: bool) -> None:
        """Write a file and note it. Raises OSError."""
        folder = self._root / address.owner
        path = folder / (address.file_name + (TURN_END if is_turn_end else ""))
        part = folder / f"{address.file_name}{PART}"
        try:
            write_block(path, part, address, self.model, data, self.checksums)
        except FileNotFoundError:  # a caller's first block, or its folder was purged
            if not (self._root / ABOUT).exists():
                self.folder.add_model(self.model, self._about)
            folder.mkdir(mode=0o700, exist_ok=True)
            write_block(path, part, address, self.model, data, self.checksums)
        self._is_turn_end[address.digest] = is_turn_end

    def forget(self, address: BlockAddress) -> None:
        """Take a file out of the index that is gone, or that nobody is to find."""
        self._is_turn_end.pop(address.digest, None)

    def remove(self, address: BlockAddress) -> None:
        """Remove a file and its entry, if there are any."""
        path = self.path(address)
        self.forget(address)
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self.folder.release(size)


class BlockStore:
    """Files of one model in a `KVFolder`."""

    def __init__(
        self,
        folder: KVFolder,
        model: bytes,
        about: dict[str, Any],
        *,
        queue_bytes: int = BUFFER_BYTES,
        make_buffer: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
        checksums: Checksums = zlib_checksums,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the model's part of `folder`, which is open. A thread lists its files. Raises OSError.

        `model`: digest of all that the bits of a block depend on. `about`: see `KVFolder.add_model`.
        `make_buffer` allocates memory that blocks are copied through.
        """
        self.folder = folder
        self._files = ModelFiles(folder, model, about, checksums)
        self.counters = self._files.counters
        self._buffers = BlockBuffers(make_buffer, 2 * queue_bytes)
        self._changed = threading.Condition()
        means = (self._files, self._buffers, self._changed, queue_bytes, clock)
        self._reader, self._writer = StoreReader(*means), StoreWriter(*means)
        self._threads = [self._writer.thread, self._reader.thread]
        for thread in self._threads:
            thread.start()

    def address(self, owner: str, kind: BlockKind, block_hash: bytes) -> BlockAddress:
        return self.folder.address(owner, kind, block_hash)

    def has(self, address: BlockAddress) -> bool:
        return address in self._files and address.digest not in self._files.leaving

    @property
    def is_listed(self) -> bool:
        """False until all files are known."""
        return self._files.is_listed

    @property
    def num_blocks(self) -> int:
        return len(self._files)

    # ------------------------------------------------------------------ write

    @property
    def is_paused(self) -> bool:
        """True for a while after the disk refused a block."""
        return self._writer.is_paused

    @property
    def has_written_all(self) -> bool:
        return self._writer.is_idle

    @property
    def seconds_per_byte(self) -> float:
        """Processor time that the last files took to write."""
        return self._writer.seconds_per_byte

    def accepts(self, size: int, copying: int = 0) -> bool:
        """Return True if a block may be queued now: the writer is not behind, and the disk took the last.

        `copying`: bytes in buffers that are to be queued before it.
        """
        return self._writer.accepts(size, copying)

    def take_buffer(self, size: int) -> memoryview:
        return self._buffers.take(size)

    def write(self, write: BlockWrite) -> None:
        self._writer.submit(write)

    def touch(self, addresses: Sequence[BlockAddress]) -> None:
        """Note that these files were used, the last one last."""
        self._writer.touch(addresses)

    def remove(self, addresses: Sequence[BlockAddress]) -> None:
        """Remove these blocks, also where they are queued to be written before. None is found any more."""
        self._writer.remove(addresses)

    # ------------------------------------------------------------------ read

    @property
    def is_stalled(self) -> bool:
        """True while a read takes so long that a request should not wait for the disk."""
        return self._reader.is_stalled

    @property
    def is_full(self) -> bool:
        """True while nothing more is read until blocks are taken. To be asked within `wait`."""
        return not self._reader.may_read

    def read(self, wanted: Sequence[tuple[BlockAddress, int]]) -> ReadJob:
        job = ReadJob(wanted)
        self._reader.submit(job)
        return job

    def cancel(self, job: ReadJob) -> None:
        self._reader.cancel(job)

    def give_back(self, buffer: memoryview) -> None:
        """Take the content of a `ReadJob` back."""
        self._buffers.give_back(buffer)
        with self._changed:
            self._reader.release(len(buffer))
            self._changed.notify_all()

    # ------------------------------------------------------------------ wait

    def wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Wait until the threads have changed something that `until` sees."""
        with self._changed:
            return self._changed.wait_for(until, seconds)

    def close(self, seconds: float) -> None:
        """Write what is queued, for `seconds` at most, and end the threads."""
        end = time.monotonic() + seconds
        self.wait(seconds, lambda: self.has_written_all)
        with self._changed:
            self._writer.close()
            self._reader.close()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - 100,000 paths would take a second
    except OSError:  # a file, or gone
        return []
