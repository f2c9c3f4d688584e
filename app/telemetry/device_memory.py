"""Memory use of each device by model, from one tick. Both dashboards draw it as a bar."""

from dataclasses import dataclass
from typing import Final

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
