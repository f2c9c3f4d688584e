"""Memory by device and model, from one tick, which both dashboards draw as a bar; and the KV blocks of loaded
models in few cells, on request.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from msgspec import Struct

from llmbox.engine.ipc.profile_messages import BlockHolder, BlockMap, BlockRun, PrefixUse

from ..engines.manager import EngineManager
from ..engines.supervisor import Supervisor
from ..gateway.generation import request_of
from .snapshot import NA, EngineSnapshot, GpuReading, Number, Tick

KINDS: Final = ("weights", "live", "cached", "kv_free", "workspace")
"""Kinds of a model's memory, in the order in which they are drawn."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Part of a device's memory. `model` is empty for other programs."""

    model: str
    kind: str
    size: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Sizes in bytes. Memory of `total` outside of `parts` is free. `note` says which values are unknown."""

    name: str
    what: str
    total: float
    free: float
    parts: tuple[MemoryPart, ...]
    note: str = ""
    problem: str = ""

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(part.model for part in self.parts if part.model))

    def of(self, model: str, kind: str) -> float:
        return sum(part.size for part in self.parts if (part.model, part.kind) == (model, kind))


def devices_of(tick: Tick) -> list[DeviceMemory]:
    """GPUs, then the machine's own memory."""
    return [*(_gpu(gpu, tick) for gpu in tick.gpus.devices), _host(tick)]


def parts_of(engine: EngineSnapshot, share: float = 1.0) -> tuple[MemoryPart, ...]:
    """Memory of an engine on one device that holds `share` of it."""
    block = engine.kv_bytes / engine.blocks_total if engine.blocks_total else 0.0
    sizes = (
        engine.weights_bytes,
        block * engine.blocks_live,
        block * engine.blocks_cached,
        block * engine.blocks_free,
        engine.workspace_bytes,
    )
    pairs = zip(KINDS, sizes, strict=True)
    return tuple(MemoryPart(engine.model, kind, size * share) for kind, size in pairs if size > 0)


def _gpu(gpu: GpuReading, tick: Tick) -> DeviceMemory:
    name = f"GPU {gpu.index}"
    total, free = _known(gpu.memory_total), _known(gpu.memory_free)
    if gpu.problem or not total:
        return DeviceMemory(
            name, gpu.name, total, free, (), problem=gpu.problem or "its memory is not reported"
        )
    parts: list[MemoryPart] = []
    for engine in tick.engines:
        places = _gpus_of(engine, tick)
        if gpu.index in places:
            parts += parts_of(engine, 1 / len(places))
    planned = sum(part.size for part in parts)
    note = ""
    others = _known(gpu.memory_others)
    if gpu.memory_others is NA:
        note = "the driver does not tell whose memory is whose"
        others = max(0.0, total - free - planned)
    return _filled(DeviceMemory(name, gpu.name, total, free, tuple(parts), note), others)


def _host(tick: Tick) -> DeviceMemory:
    total, free = _known(tick.host.memory_total), _known(tick.host.memory_available)
    if not total:
        return DeviceMemory("RAM", "", 0.0, 0.0, (), problem=tick.host.problem or "its size is not reported")
    parts = tuple(part for engine in tick.engines if engine.device == "cpu" for part in parts_of(engine))
    # Planned memory is not all touched yet: pages of a KV pool are allocated on first use.
    others = max(0.0, total - free - sum(part.size for part in parts))
    return _filled(DeviceMemory("RAM", f"{tick.host.cores} cores", total, free, parts), others)


def _filled(device: DeviceMemory, others: float) -> DeviceMemory:
    if others <= 0:
        return device
    parts = (*device.parts, MemoryPart("", "others", others))
    return DeviceMemory(device.name, device.what, device.total, device.free, parts, device.note)


def _gpus_of(engine: EngineSnapshot, tick: Tick) -> set[int]:
    """GPUs of its ranks, as the driver reports them. If it does not, consecutive ones from the engine's
    device on.
    """
    kind, _, index = engine.device.partition(":")
    if kind != "cuda":
        return set()
    ranks = max(1, len(engine.pids))
    seen = {
        gpu.index for gpu in tick.gpus.devices if any(process.pid in engine.pids for process in gpu.processes)
    }
    first = int(index) if index.isdigit() else 0
    return seen if len(seen) == ranks else set(range(first, first + ranks))


def _known(value: Number) -> float:
    return 0.0 if value is NA else float(value)


FRESH_S: Final = 0.5
"""Seconds for which several readers share one answer."""
MOST_HOLDERS: Final = 50


class CellRun(Struct, frozen=True, array_like=True):
    """`count` neighboring cells of equal content. Blocks in one that are neither live nor cached are free."""

    count: int
    live: int
    cached: int
    owner: int
    """Index into `owners` of the request that holds the first live block, or computed the first cached one.
    -1: unknown.
    """
    holders: int
    """Requests that share the first live block."""

    @property
    def state(self) -> str:
        """State to draw. One live block of many makes a live cell, so that it is visible."""
        return "live" if self.live else "cached" if self.cached else "free"


class KVBlockMap(Struct, frozen=True, kw_only=True):
    model: str
    as_of: float
    """Unix seconds."""
    block_size: int
    num_blocks: int
    blocks_a_cell: int
    cells: list[CellRun]
    owners: list[str]
    """Request ids."""
    holders: list[BlockHolder]
    """Requests with most blocks first."""
    prefixes: list[PrefixUse]
    evictions: int
    """Cached blocks evicted for others since the engine started."""


class BlockReader:
    """Use it only from the daemon's event loop."""

    def __init__(self, engines: EngineManager) -> None:
        self._engines = engines
        self._seen: dict[str, tuple[float, BlockMap]] = {}

    async def read(self, most_cells: int) -> list[KVBlockMap]:
        """Maps of all models that are ready. An engine too busy to answer gives its previous one."""
        supervisors = [model.supervisor for model in self._engines.models()]
        await asyncio.gather(*(self._look(each) for each in supervisors))
        names = {each.name for each in supervisors}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        return [draw_map(name, at, found, most_cells) for name, (at, found) in self._seen.items()]

    async def _look(self, supervisor: Supervisor) -> None:
        at, _ = self._seen.get(supervisor.name, (0.0, None))
        if 0 <= time.time() - at < FRESH_S:
            return
        found = await supervisor.block_map()
        if found is not None:
            self._seen[supervisor.name] = time.time(), found


def draw_map(model: str, as_of: float, found: BlockMap, most_cells: int) -> KVBlockMap:
    """Draw a map in at most `most_cells` cells of equally many blocks (the last one may have fewer)."""
    each = max(1, -(-found.num_blocks // most_cells))
    cells = map(_cell, _in_cells(found.runs, each))
    runs = [CellRun(sum(1 for _ in same), *cell) for cell, same in groupby(cells)]
    return KVBlockMap(
        model=model,
        as_of=as_of,
        block_size=found.block_size,
        num_blocks=found.num_blocks,
        blocks_a_cell=each,
        cells=runs,
        owners=[request_of(owner) for owner in found.owners],
        holders=_holders(found)[:MOST_HOLDERS],
        prefixes=[replace(use, last_request=request_of(use.last_request)) for use in found.prefixes],
        evictions=found.evictions,
    )


def _in_cells(runs: list[BlockRun], each: int) -> Iterator[list[tuple[int, BlockRun]]]:
    """Split the runs at cell borders: a list of (blocks of it, run) for each cell."""
    cell: list[tuple[int, BlockRun]] = []
    room = each
    for run in runs:
        left = run.count
        while left:
            taken = min(left, room)
            cell.append((taken, run))
            left, room = left - taken, room - taken
            if not room:
                yield cell
                cell, room = [], each
    if cell:
        yield cell


def _cell(parts: list[tuple[int, BlockRun]]) -> tuple[int, int, int, int]:
    """Summarize a cell as (live, cached, owner, holders)."""
    live = [(count, run) for count, run in parts if run.state == "live"]
    cached = [(count, run) for count, run in parts if run.state == "cached"]
    first = next((run for _, run in [*live, *cached]), None)
    owner, holders = (-1, 0) if first is None else (first.owner, first.holders)
    return sum(count for count, _ in live), sum(count for count, _ in cached), owner, holders


def _holders(found: BlockMap) -> list[BlockHolder]:
    """Holders by request: choices of one request are combined."""
    made: dict[str, BlockHolder] = {}
    for each in found.holders:
        name = request_of(each.request_id)
        before = made.get(name, BlockHolder(request_id=name, blocks=0, shared=0))
        made[name] = replace(before, blocks=before.blocks + each.blocks, shared=before.shared + each.shared)
    return sorted(made.values(), key=lambda each: -each.blocks)
