"""Several models in one memory: who leaves for whom, and when. Pure functions over plain facts."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory, or on its way there."""

    name: str
    size: int
    """Bytes."""
    busy: bool
    pinned: bool
    idle_since: float
    """Seconds of the clock that `now` is from; of a busy one without meaning."""
    ttl: float | None = None
    """Idle seconds after which it leaves; None keeps it."""


@dataclass(frozen=True, slots=True)
class Room:
    evict: tuple[str, ...]
    """In this order."""
    free: int
    """Bytes of the budget that nobody takes once they are gone."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    need: int
    have: int
    """Free, and taken by models that could leave."""
    blockers: tuple[str, ...]
    """Busy or pinned models without which it would fit; empty when it never fits."""


def make_room(need: int, budget: int, residents: Iterable[Resident]) -> Room | NoRoom:
    """The least recently used idle models leave, and no more of them than it takes."""
    everybody = list(residents)
    free = budget - sum(each.size for each in everybody)
    movable = sorted((r for r in everybody if not r.busy and not r.pinned), key=lambda r: r.idle_since)
    leaving: list[Resident] = []
    for each in movable:
        if free >= need:
            break
        leaving.append(each)
        free += each.size
    if free < need:
        blockers = tuple(r.name for r in everybody if r.busy or r.pinned) if need <= budget else ()
        return NoRoom(need, free, blockers)
    for each in reversed(leaving.copy()):  # a large one may have made the small ones before it unnecessary
        if free - each.size >= need:
            leaving.remove(each)
            free -= each.size
    return Room(tuple(each.name for each in leaving), free)


def expired(now: float, residents: Iterable[Resident]) -> list[str]:
    """Idle for longer than their time to live."""
    return [
        each.name
        for each in residents
        if each.ttl is not None and not each.busy and not each.pinned and now - each.idle_since >= each.ttl
    ]


def next_look(now: float, residents: Iterable[Resident]) -> float | None:
    """When somebody may expire at the earliest; None: nobody will. A busy one is idle now at the earliest."""
    times = [
        (now if each.busy else each.idle_since) + each.ttl
        for each in residents
        if each.ttl is not None and not each.pinned
    ]
    return min(times, default=None)
