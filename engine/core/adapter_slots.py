"""LoRA adapters in memory: the slot of each, with LRU eviction. No files and no torch.

A running request holds its adapter. One that is not in memory takes a free slot, or that of the adapter that
was unused for longest; where all are held, its request waits as it would for KV blocks.
"""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import PurePath

from ..errors import DoesNotFit
from .request import Request


@dataclass(slots=True)
class _Resident:
    slot: int
    nbytes: int
    holders: int = 0


class AdapterSlots:
    """Adapter slots of one engine, of `limit` bytes in total."""

    def __init__(self, slots: int, limit: int) -> None:
        self._free = list(reversed(range(slots)))
        self._limit = limit
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        """By folder, least recently used first."""
        self._sizes: dict[str, int] = {}
        self.loads: list[tuple[int, str]] = []
        """(slot, folder) to load before the next step, in order; an empty folder empties the slot."""
        self.digests: list[str] = []
        """Digests of the adapters in memory, a new list after each change."""

    @property
    def used_bytes(self) -> int:
        return sum(resident.nbytes for resident in self._residents.values())

    def knows(self, folder: str) -> bool:
        """Return True if `admit` has accepted this adapter."""
        return folder in self._sizes

    def admit(self, folder: str, nbytes: int) -> None:
        """Record the size of an adapter. Raises DoesNotFit if it is too large even alone."""
        if nbytes > self._limit:
            raise DoesNotFit(
                f"the adapter takes {nbytes / 1e6:.0f} MB and {self._limit / 1e6:.0f} MB are for adapters: "
                "load the model with a larger --lora-memory"
            )
        self._sizes[folder] = nbytes

    def hold(self, request: Request) -> bool:
        """Give a request the slot of its adapter; False, with nothing changed, where all are held."""
        folder = request.adapter
        resident = self._residents.get(folder)
        if resident is None:
            resident = self._take(folder)
            if resident is None:
                return False
        self._residents.move_to_end(folder)
        resident.holders += 1
        request.adapter_slot = resident.slot
        return True

    def release(self, request: Request, *, suspect: bool = False) -> None:
        """Take the slot back. `suspect`: its content may be wrong and is loaded again at its next use."""
        resident = self._residents.get(request.adapter)
        if request.adapter_slot < 0 or resident is None:
            return
        request.adapter_slot = -1
        resident.holders -= 1
        if suspect and not resident.holders:
            self._drop(request.adapter)

    def take_loads(self) -> list[tuple[int, str]]:
        """Return the loads that must happen before the next step."""
        loads, self.loads = self.loads, []
        return loads

    def _take(self, folder: str) -> _Resident | None:
        need = self._sizes[folder]
        idle = [name for name, resident in self._residents.items() if not resident.holders]
        evicted: list[str] = []
        room, slots = self._limit - self.used_bytes, len(self._free)
        while room < need or not slots:
            if not idle:
                return None
            evicted.append(idle.pop(0))
            room += self._residents[evicted[-1]].nbytes
            slots += 1
        for name in evicted:
            self._drop(name)
        resident = self._residents[folder] = _Resident(self._free.pop(), need)
        self.loads.append((resident.slot, folder))
        self._list()
        return resident

    def _drop(self, folder: str) -> None:
        slot = self._residents.pop(folder).slot
        self._free.append(slot)
        self.loads.append((slot, ""))
        self._list()

    def _list(self) -> None:
        self.digests = [PurePath(folder).name for folder in self._residents]

    def check(self, running: list[Request]) -> None:
        """Assert that the holders are the running requests with an adapter."""
        held: dict[str, int] = {}
        for request in running:
            if request.adapter:
                held[request.adapter] = held.get(request.adapter, 0) + 1
                assert self._residents[request.adapter].slot == request.adapter_slot
        assert held == {name: each.holders for name, each in self._residents.items() if each.holders}
