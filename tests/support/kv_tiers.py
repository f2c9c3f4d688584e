"""KV cache on disk for tests: an engine over `FakeRunner` whose blocks go to files."""

import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmbox.engine.core.kv_cache.host_tier import HostTier
from llmbox.engine.core.kv_cache.tiers import KVTiers
from llmbox.engine.kv_store.block_file import BlockKind, zlib_checksums
from llmbox.engine.kv_store.folder import KVFolder
from llmbox.engine.kv_store.store import BlockStore
from support.fake_runner import FakeRunner
from support.scheduling import Answer, FakeEngine

MODEL = bytes(range(16))
SECONDS = 20
"""Longest wait for the threads of a store."""


class CopiesEvent:
    """Event of copies that are done after `polls` questions, and arrive then."""

    def __init__(self, memory: "FakeBlockMemory", polls: int) -> None:
        self._memory, self._polls, self._number = memory, polls, memory.num_queued

    @property
    def is_done(self) -> bool:
        self._polls -= 1
        if self._polls < 0:
            self._memory.arrive(self._number)
        return self._polls < 0

    def wait(self) -> None:
        self._polls = 0
        self._memory.arrive(self._number)


class FakeBlockMemory:
    """Bytes of the numbers in a `FakeRunner`'s slots.

    As on a device, a save may read its block as late as `record`, and what is copied is there once the event
    is done.
    """

    checksums = staticmethod(zlib_checksums)

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.polls = 0
        """How often the tiers ask before copies are done."""
        block = 8 * runner.block_size
        self.sizes: dict[BlockKind, int] = {"kv": block}
        if runner.window:
            self.sizes["window"] = block
        if runner.states:
            self.sizes["state"] = 8
        self._reads: list[Callable[[], None]] = []
        self._arrivals: deque[Callable[[], None]] = deque()
        self.num_queued = 0
        """Copies so far."""

    def make_buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def save(self, kind: BlockKind, index: int, into: memoryview) -> None:
        slots, count = self._slots(kind), self.sizes[kind] // 8
        seen: list[bytes] = []

        def read() -> None:
            numbers = slots[index * count : (index + 1) * count]
            seen.append(struct.pack(f"<{count}q", *(-1 if number is None else number for number in numbers)))

        def arrive() -> None:
            into[:] = seen[0]

        self._reads.append(read)
        self._queue(arrive)

    def load(self, kind: BlockKind, index: int, data: memoryview) -> None:
        slots, count = self._slots(kind), self.sizes[kind] // 8

        def arrive() -> None:
            slots[index * count : (index + 1) * count] = struct.unpack(f"<{count}q", data)

        self._queue(arrive)

    def _queue(self, arrive: Callable[[], None]) -> None:
        self._arrivals.append(arrive)
        self.num_queued += 1

    def record(self) -> CopiesEvent:
        while self._reads:
            self._reads.pop(0)()
        return CopiesEvent(self, self.polls)

    def arrive(self, number: int) -> None:
        """End the first `number` copies."""
        while self.num_queued - len(self._arrivals) < number:
            self._arrivals.popleft()()

    def _slots(self, kind: BlockKind) -> list[int | None]:
        runner = self._runner
        return {"kv": runner.slots, "window": runner.window_slots, "state": runner.states}[kind]


def open_folder(root: Path, most_bytes: int = 1 << 30, **options: Any) -> KVFolder:
    folder = KVFolder(root, most_bytes, **options)
    folder.open()
    return folder


def open_store(root: Path, most_bytes: int = 1 << 30, **options: Any) -> BlockStore:
    """Open a store that knows its files."""
    store = BlockStore(open_folder(root, most_bytes), MODEL, {"origins": []}, **options)
    assert store.wait(SECONDS, lambda: store.is_listed)
    return store


def write_out(tiers: KVTiers) -> None:
    """Have everything written that waits."""
    end = time.monotonic() + SECONDS
    while tiers.pump():
        tiers.wait_for_writer(1.0)
        assert time.monotonic() < end
    if tiers.disk is not None:
        store = tiers.disk.store
        assert store.wait(SECONDS, lambda: store.has_written_all)


class TieredEngine(FakeEngine):
    """A `FakeEngine` whose cached blocks go to `root` and come from there."""

    def __init__(
        self,
        root: Path | None,
        store: dict[str, Any] | None = None,
        *,
        polls: int = 0,
        host: int = 0,
        **options: Any,
    ) -> None:
        """`root`: None keeps nothing on disk. `host`: blocks of each kind that the host tier has room for."""
        super().__init__(**options)
        kv_cache = self.scheduler.kv_cache
        found = None if root is None else open_store(root, **(store or {}))
        self.memory = FakeBlockMemory(self.runner)
        self.memory.polls = polls
        self.host = HostTier(self.memory, dict.fromkeys(self.memory.sizes, host)) if host else None
        self.tiers = kv_cache.tiers = KVTiers(found, self.memory, kv_cache, host=self.host)

    @property
    def store(self) -> BlockStore:
        assert self.tiers.disk is not None
        return self.tiers.disk.store

    def run(self, max_steps: int = 100_000) -> dict[str, Answer]:
        end = time.monotonic() + SECONDS
        while self.engine.has_work:
            assert time.monotonic() < end
            self.step()
            self.scheduler.check()
        assert self.scheduler.pool.num_used == 0
        return self.answers

    def close(self) -> None:
        write_out(self.tiers)
        self.tiers.close(SECONDS)
