"""Memory of a GPU as the driver and as torch's allocator count it."""

import weakref
from dataclasses import dataclass, field

from torch import Tensor

ROUND = 512
"""Bytes that the allocator rounds up to."""


@dataclass
class Card:
    """A GPU that nobody has opened. `context`: bytes that the first call takes; `graph`: what each takes."""

    total: int = 8 << 30
    context: int = 400 << 20
    graph: int = 1 << 20
    multiprocessors: int = 132
    capability: tuple[int, int] = (9, 0)
    name: str = "Stand-in"
    uuid: str = "1234"
    opened: bool = False
    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    reserved_peak: int = 0
    graphs: int = 0
    _seen: dict[int, int] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.total - self.opened * self.context - self.reserved - self.graphs * self.graph

    def open(self) -> None:
        self.opened = True

    def hold(self, tensor: Tensor) -> None:
        """Its storage lies here until nobody has it any more."""
        self.open()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = self._seen[key] = -(-storage.nbytes() // ROUND) * ROUND
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.allocated -= size

    def reset_peaks(self) -> None:
        self.peak, self.reserved_peak = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.reserved = self.allocated
