"""Eviction policy: choose a device and the idle models to unload so that a new model fits.

A memory is that of one GPU, or the one that all CPUs share; each has its own budget. Models on GPUs take main
memory too, which has the number `HOST` beside those of GPUs. Pure functions over plain data.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from llmbox.engine.errors import DeviceError
from llmbox.engine.hardware.machine import Machine

HOST: Final = -1
"""Number of main memory beside those of GPUs."""


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """Model in memory, or one that is being loaded."""

    name: str
    takes: Mapping[int, int]
    """Bytes that it takes of each memory, by the memory's number."""
    busy: bool
    pinned: bool
    idle_since: float
    """Time at which it became idle, on the clock of `now`, in seconds. Meaningless while it is busy."""
    ttl: float | None = None
    """Time to live: idle seconds after which it is unloaded. None keeps it."""
    owned: bool = False
    """Loaded by the box's owner and not by a request."""

    @property
    def claim(self) -> str:
        """Reason why it cannot be evicted, for error messages."""
        return "busy" if self.busy else "pinned" if self.pinned else "kept for the box's owner"

    def may_leave(self, *, keep_owned: bool) -> bool:
        return not (self.busy or self.pinned or (keep_owned and self.owned))

    @property
    def size(self) -> int:
        return sum(self.takes.values())


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """Memories that a model could be placed in, and the bytes that it needs of each of them."""

    places: tuple[int, ...]
    need: int
    """Minimum bytes: one request of full context. With less, the context must be lowered or the load
    refused.
    """
    want: int
    """Bytes that it takes if they are free."""
    host: int = 0
    """Minimum bytes of main memory beside GPUs."""
    host_want: int = 0
    """Maximum bytes of main memory beside GPUs."""


@dataclass(frozen=True, slots=True)
class MemoryAllocation:
    """Placement of a model, with the models to unload for it."""

    places: tuple[int, ...]
    evict: tuple[str, ...]
    """Models to unload, in this order."""
    free: int
    """Bytes of the budget that are free after the evictions, in the fullest of the places."""


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """Refusal: the model does not fit. Sizes in bytes."""

    need: int
    have: int
    """Bytes that are free or taken by evictable models."""
    blockers: tuple[str, ...]
    """Models that cannot be evicted and without which it would fit. Empty when it can never fit."""
    of_host: bool = False
    """True if main memory beside GPUs is what is missing."""


def choose_placement(
    requests: Sequence[MemoryRequest],
    budgets: Sequence[int] | Mapping[int, int],
    residents: Iterable[ResidentModel],
    *,
    keep_owned: bool = False,
) -> MemoryAllocation | AllocationFailure:
    """Choose the best of several placements.

    Placements without evictions come first: among them the first one where all of `want` is free, else the
    one with the most free memory. If every placement needs evictions, choose the one whose models have been
    idle for longest. `keep_owned`: evict only models that requests loaded.
    """
    everybody = list(residents)
    found = [
        (request, plan_evictions(request, budgets, everybody, keep_owned=keep_owned)) for request in requests
    ]
    rooms = [(request, room) for request, room in found if isinstance(room, MemoryAllocation)]
    if not rooms:
        refusals = [room for _, room in found if isinstance(room, AllocationFailure)]
        return max(refusals, key=lambda no: (bool(no.blockers), no.have - no.need))
    untouched = [(request, room) for request, room in rooms if not room.evict]
    if untouched:
        return max(untouched, key=lambda each: min(each[0].want, each[1].free) - each[0].want)[1]
    idle_since = {each.name: each.idle_since for each in everybody}
    return min(rooms, key=lambda each: max(idle_since[name] for name in each[1].evict))[1]


def plan_evictions(
    request: MemoryRequest,
    budgets: Sequence[int] | Mapping[int, int],
    residents: Iterable[ResidentModel],
    *,
    keep_owned: bool = False,
) -> MemoryAllocation | AllocationFailure:
    """Plan the evictions for one placement: no more idle models than needed.

    Models that requests loaded go first, then the least recently used. `keep_owned`: evict no others.
    """
    needs = dict.fromkeys(request.places, request.need) | ({HOST: request.host} if request.host else {})
    here = [each for each in residents if any(each.takes.get(place) for place in needs)]
    free = {place: budgets[place] - sum(r.takes.get(place, 0) for r in here) for place in needs}
    movable = [r for r in here if r.may_leave(keep_owned=keep_owned)]
    movable.sort(key=lambda r: (r.owned, r.idle_since))
    leaving: list[ResidentModel] = []
    for each in movable:
        if any(free[place] < need and each.takes.get(place) for place, need in needs.items()):
            leaving.append(each)
            free = _after(free, each)
    short = [place for place, need in needs.items() if free[place] < need]
    if short:
        place = min(short, key=lambda place: free[place] - needs[place])
        ever = all(need <= budgets[place] for place, need in needs.items())
        staying = (r.name for r in here if not r.may_leave(keep_owned=keep_owned))
        blockers = tuple(staying) if ever else ()
        return AllocationFailure(needs[place], free[place], blockers, place == HOST)
    for each in reversed(leaving.copy()):  # a large model may have made smaller ones unnecessary
        without = {place: free[place] - each.takes.get(place, 0) for place in free}
        if all(without[place] >= need for place, need in needs.items()):
            leaving.remove(each)
            free = without
    least = min(free[place] for place in request.places)
    return MemoryAllocation(request.places, tuple(each.name for each in leaving), least)


def _after(free: Mapping[int, int], leaves: ResidentModel) -> dict[int, int]:
    return {place: size + leaves.takes.get(place, 0) for place, size in free.items()}


def expired(now: float, residents: Iterable[ResidentModel]) -> list[str]:
    """Names of the models that have been idle for longer than their time to live."""
    return [
        each.name
        for each in residents
        if each.ttl is not None and not each.busy and not each.pinned and now - each.idle_since >= each.ttl
    ]


def next_look(now: float, residents: Iterable[ResidentModel]) -> float | None:
    """Earliest time at which a model may expire, or None. A busy model counts as idle from now on."""
    times = [
        (now if each.busy else each.idle_since) + each.ttl
        for each in residents
        if each.ttl is not None and not each.pinned
    ]
    return min(times, default=None)


Place = Literal["cpu", "cuda"]

CPU_SHARE, CUDA_SHARE = 0.8, 0.9
"""Share of all memory that models may take where no budget is set; the rest is for other programs."""


def total_budget(machine: Machine, device: Place, gigabytes: float | None) -> int:
    """Budget of one memory in bytes, with what loaded models take of it. A cgroup limit counts as the
    machine's memory.
    """
    if device == "cuda":
        have = machine.gpus[0].total
        share = CUDA_SHARE
    else:
        have = machine.memory.total
        share = CPU_SHARE
    return int(have * share) if gigabytes is None else min(int(gigabytes * 1e9), have)


def budgets(machine: Machine, device: Place, gigabytes: float | None) -> tuple[int, ...]:
    """Budget in bytes of each memory of this kind: of every GPU, or of the one memory that all CPUs share."""
    if device == "cpu":
        return (total_budget(machine, device, gigabytes),)
    asked = None if gigabytes is None else int(gigabytes * 1e9)
    totals = (gpu.total for gpu in machine.gpus)
    return tuple(int(total * CUDA_SHARE) if asked is None else min(asked, total) for total in totals)


def usable_device(machine: Machine, asked: str) -> Place:
    """Return the device that a model would run on. Raises DeviceError if there is no such device."""
    if asked == "cuda" and not machine.gpus:
        raise DeviceError(
            f"no GPU can be used ({machine.no_gpu_reason or 'none is visible'}): use --device cpu"
        )
    return device_of(machine, asked)


def device_of(machine: Machine, asked: str) -> Place:
    """Device that a model would run on, without checking that it exists."""
    return "cuda" if asked == "cuda" or (asked == "auto" and machine.gpus) else "cpu"
