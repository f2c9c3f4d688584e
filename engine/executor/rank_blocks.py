"""KV blocks of several ranks on one CPU: rank 0 gathers the parts of all ranks in shared memory.

So a block is one file, which is there with the parts of every rank or not at all. Commands go over the link
of the steps, in their order: a rank copies what the steps before have written, before the next ones overwrite
it.
"""

import ctypes
import mmap
import os
import select
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

import torch

from ..distributed.step_codec import Frame, Link
from ..errors import RankLost
from ..kv_store.block_file import KINDS, BlockKind, Checksums
from ..runner.block_memory import DeviceBlockMemory
from .workers import ARENA_BYTES, WorkerGroup

PATIENCE_SECONDS: Final = 30.0
"""Time for which rank 0 waits for copies of other ranks, after the steps before them."""
_PAGE: Final = 4096


class SharedBuffers:
    """Memory that all ranks map. A buffer is free again when nobody has its view."""

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, ARENA_BYTES)
        self._begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._map))
        self._view = memoryview(self._map)
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0

    def make(self, size: int) -> memoryview:
        """Allocate a buffer. Raises MemoryError."""
        free = self._free[size]
        if not free:
            if self._end + size > ARENA_BYTES:
                raise MemoryError("the memory that ranks share for KV blocks is used up")
            free.append(self._end)
            self._end += -(-size // _PAGE) * _PAGE
        begin = free.pop()
        view = self._view[begin : begin + size]
        weakref.finalize(view, free.append, begin).atexit = False
        return view

    def part(self, begin: int, size: int) -> memoryview:
        return self._view[begin : begin + size]

    def place(self, buffer: memoryview) -> int:
        """Return where a buffer begins."""
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(buffer)) - self._begin


class WorkerBlocks:
    """A worker's side: copies its part of blocks as rank 0 says, and counts the commands that are done."""

    def __init__(self, link: Link, memory: DeviceBlockMemory, handle: int, done: int) -> None:
        """`handle`: the shared memory. `done`: eventfd of this rank."""
        self._link, self._memory, self._done = link, memory, done
        self._handle = handle
        self._buffers: SharedBuffers | None = None

    def execute(self, frame: Frame) -> None:
        if self._buffers is None:
            self._open()
            return
        for way, kind, index, begin in frame.body["copies"]:
            data = self._buffers.part(begin, self._memory.sizes[kind])
            (self._memory.save if way == "save" else self._memory.load)(kind, index, data)
        self._memory.record().wait()
        os.eventfd_write(self._done, 1)

    def _open(self) -> None:
        """Map the shared memory and answer with the bytes of this rank's part of each kind of block."""
        answer: dict[str, Any] = {"sizes": self._memory.sizes}
        try:
            self._buffers = SharedBuffers(self._handle)
        except OSError as error:
            answer = {"problem": str(error)}
        self._link.send(Frame("block_sizes", answer).encode())


class RankCopiesEvent:
    """Event after the copies of all ranks."""

    def __init__(self, memory: "RankBlockMemory", number: int) -> None:
        self._memory, self._number = memory, number

    @property
    def is_done(self) -> bool:
        return self._memory.has_done(self._number, 0.0)

    def wait(self) -> None:
        if not self._memory.has_done(self._number, PATIENCE_SECONDS):
            raise RankLost("another rank has not copied its KV blocks in time")


class RankBlockMemory:
    """`BlockMemory` over the memory of all ranks, from rank 0."""

    def __init__(
        self,
        local: DeviceBlockMemory,
        workers: WorkerGroup,
        guarding: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`guarding`: see `WorkerWatchdog.guarding`. Raises OSError where a rank cannot map the memory."""
        self._local, self._workers, self._guarding = local, workers, guarding
        self._buffers = SharedBuffers(workers.shared_blocks)
        with guarding():
            workers.send(Frame("block_sizes"))
            answers = [worker.link.receive().body for worker in workers.processes]
        if problem := next((answer["problem"] for answer in answers if "problem" in answer), None):
            raise OSError(problem)
        parts: list[dict[BlockKind, int]] = [dict(local.sizes), *(answer["sizes"] for answer in answers)]
        kinds = [kind for kind in KINDS if any(kind in sizes for sizes in parts)]
        self.sizes: dict[BlockKind, int] = {
            kind: sum(sizes.get(kind, 0) for sizes in parts) for kind in kinds
        }
        self._begins: list[dict[BlockKind, int]] = [
            {kind: sum(sizes.get(kind, 0) for sizes in parts[:rank]) for kind in kinds if sizes_of.get(kind)}
            for rank, sizes_of in enumerate(parts)
        ]
        """Begin of a rank's part, for each kind that it has."""
        self._copies: list[list[tuple[str, BlockKind, int, int]]] = [[] for _ in workers.processes]
        self._sent = 0
        self._done = [0] * len(workers.processes)

    @property
    def device(self) -> torch.device:
        return self._local.device

    @property
    def checksums(self) -> Checksums:
        return self._local.checksums

    def make_buffer(self, size: int) -> memoryview:
        return self._buffers.make(size)

    def save(self, kind: BlockKind, index: int, into: memoryview) -> None:
        self._copy("save", kind, index, into)

    def load(self, kind: BlockKind, index: int, data: memoryview) -> None:
        self._copy("load", kind, index, data)

    def _copy(self, way: Literal["save", "load"], kind: BlockKind, index: int, data: memoryview) -> None:
        mine, *others = self._begins
        if kind in mine:
            part = data[mine[kind] : mine[kind] + self._local.sizes[kind]]
            (self._local.save if way == "save" else self._local.load)(kind, index, part)
        begin = self._buffers.place(data)
        for copies, begins in zip(self._copies, others, strict=True):
            if kind in begins:
                copies.append((way, kind, index, begin + begins[kind]))

    def record(self) -> RankCopiesEvent:
        with self._guarding():
            for worker, copies in zip(self._workers.processes, self._copies, strict=True):
                worker.link.send(Frame("copy_blocks", {"copies": copies}).encode())
                copies.clear()
        self._sent += 1
        return RankCopiesEvent(self, self._sent)

    def has_done(self, number: int, seconds: float) -> bool:
        """Wait until all ranks have done `number` commands, for `seconds` at most. False: they have not."""
        end = time.monotonic() + seconds
        for place, done in enumerate(self._workers.block_events):
            while self._done[place] < number:
                if not select.select([done], [], [], max(0.0, end - time.monotonic()))[0]:
                    return False
                self._done[place] += os.eventfd_read(done)
        return True
