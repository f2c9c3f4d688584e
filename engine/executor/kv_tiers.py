"""Tiers behind an engine's prefix cache: opened beside the loaded model, or left out with the reason.

Ranks on one CPU hold a part of each block: rank 0 gathers the parts in shared memory, so that a block is one
file, which is there with the parts of every rank or not at all. Commands go over the link of the steps, in
their order: a rank copies what the steps before have written, before the next ones overwrite it.
"""

import ctypes
import hashlib
import logging
import mmap
import os
import select
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal

import torch

from ..config import EngineConfig
from ..core.kv_cache.block_pool import BlockMemory
from ..core.kv_cache.host_tier import HostTier
from ..core.kv_cache.manager import KVCacheManager
from ..core.kv_cache.tiers import KVTiers
from ..core.speculation.answer_files import AnswerFiles
from ..distributed.step_codec import Frame, Link
from ..errors import ModelError, RankLost
from ..hardware.machine import show_bytes
from ..kv_store import usage
from ..kv_store.block_file import KINDS, MODEL_BYTES, BlockKind, Checksums, HandoverSegment
from ..kv_store.folder import KVFolder, KVFolderUnusable
from ..kv_store.store import BlockStore
from ..kv_store.store_threads import BUFFER_BYTES
from ..model.rotary import Rotary
from ..planning.memory_plan import MemoryPlan
from ..runner.block_memory import DeviceBlockMemory
from ..weights.packed_cache.cache import PackKey
from .rank_engine import RankEngine
from .workers import ARENA_BYTES, WorkerGroup

log = logging.getLogger("llmbox.engine")

LEAST_BUFFER_BYTES = 4 << 20
"""Bytes of each direction's buffers where the plan has none to spare."""
_CODE = ("engine/model", "engine/model_config", "engine/vision", "engine/weights", "kernels")
"""Folders whose code decides the bits of keys and values, next to the kernels' own digest."""
_PROBED = (1, 1000)
"""Positions at which the tables of RoPE are compared: `dynamic` frequencies follow the served context."""
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


def open_tiers(
    config: EngineConfig,
    plan: MemoryPlan,
    computed: RankEngine,
    memory: DeviceBlockMemory | RankBlockMemory,
    kv_cache: KVCacheManager,
) -> AnswerFiles | None:
    """Set the tiers behind `kv_cache`, and return the files for answers beside those on disk. Where the disk
    is left out, the log has the reason.
    """
    if not config.prefix_cache:
        return None
    host = open_host_tier(plan, memory)
    store, answers = _open_store(config, plan, computed, memory)
    if store is not None or host is not None:
        kv_cache.tiers = KVTiers(store, memory, kv_cache, host=host)
    return answers


def open_host_tier(plan: MemoryPlan, memory: BlockMemory) -> HostTier | None:
    """Return the tier for blocks that a GPU evicts; None where the plan has no memory for it. Blocks of each
    kind get the share that they have of the device's memory.
    """
    pools: dict[BlockKind, int] = {"kv": plan.num_blocks, "window": plan.window_blocks}
    pools["state"] = plan.state_slots
    device = sum(pools[kind] * size for kind, size in memory.sizes.items())
    if not plan.host_bytes or not device:
        return None
    share = plan.host_bytes / device
    log.info("KV blocks that the GPU evicts: at most %s of main memory", show_bytes(plan.host_bytes))
    return HostTier(memory, {kind: int(pools[kind] * share) for kind in memory.sizes})


def _open_store(
    config: EngineConfig,
    plan: MemoryPlan,
    computed: RankEngine,
    memory: DeviceBlockMemory | RankBlockMemory,
) -> tuple[BlockStore | None, AnswerFiles | None]:
    place = usage.read_variables()
    if place is None:
        return None, None
    try:
        folder = KVFolder(*place)
        folder.open()
        key = _pack_key(config, plan, computed)
        about = {
            "model": config.model_path,
            "format": f"{plan.dtype if plan.quant == 'none' else plan.quant}, KV {plan.kv_dtype}",
            "origins": [[origin.path, origin.size, origin.mtime_ns] for origin in key.origins()],
        }
        digest = fingerprint(key, plan, computed.rotary, memory)
        limit = max(LEAST_BUFFER_BYTES, plan.buffer_bytes // 2) if plan.device == "cpu" else BUFFER_BYTES
        store = BlockStore(
            folder,
            digest,
            about,
            queue_bytes=limit,
            make_buffer=memory.make_buffer,
            checksums=memory.checksums,
        )
        answers = AnswerFiles(folder, digest, about, partial(_count_damage, store))
    except (KVFolderUnusable, ModelError, OSError) as error:
        log.warning("the KV cache on disk is left out: %s", error)
        return None, None
    log.info("KV cache on disk: at most %s for all models, in %s", show_bytes(place[1]), folder.root)
    return store, answers


def make_segment(
    handle: int, config: EngineConfig, plan: MemoryPlan, computed: RankEngine, memory: DeviceBlockMemory
) -> HandoverSegment:
    """Map the hand-over segment of a pair. Raises ModelError and OSError."""
    digest = fingerprint(_pack_key(config, plan, computed), plan, computed.rotary, memory)
    return HandoverSegment(handle, max(memory.sizes.values()), digest, memory.checksums)


def _pack_key(config: EngineConfig, plan: MemoryPlan, computed: RankEngine) -> PackKey:
    layout = "\0".join(computed.kernels)
    return PackKey(directory=Path(config.model_path), dtype=plan.dtype, quant=plan.quant, layout=layout)


def _count_damage(store: BlockStore) -> None:
    store.counters.damaged += 1


def fingerprint(
    key: PackKey, plan: MemoryPlan, rotary: Rotary, memory: DeviceBlockMemory | RankBlockMemory
) -> bytes:
    """Return the digest of all that the bytes of a block depend on, but its tokens. Raises ModelError and
    OSError.
    """
    digest = hashlib.sha256()
    shapes: tuple[object, ...] = plan.kv_dtype, plan.block_size, plan.window, sorted(memory.sizes.items())
    if plan.ranks > 1:  # the parts of a block lie one behind the other
        shapes = (*shapes, plan.tp, plan.pp, *(["experts"] if plan.expert_parallel else []))
    for part in (key.digest(), code_digest(), *shapes):
        digest.update(f"{part}\0".encode())
    positions = torch.tensor([min(position, plan.context - 1) for position in _PROBED], device=memory.device)
    for is_long in (False, True) if rotary.short_context else (False,):
        for table in rotary.rows(positions, is_long):
            digest.update(bytes(table.float().cpu().contiguous().view(torch.uint8).flatten().tolist()))
    return digest.digest()[:MODEL_BYTES]


@cache
def code_digest() -> str:
    """Return a digest of the sources in `_CODE`."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (root / folder).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
