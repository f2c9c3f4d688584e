"""Slice of a tensor dimension that one rank holds. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Range `start .. stop` of `total` rows or columns, followed by `pad` zeros."""

    total: int
    start: int
    stop: int
    pad: int = 0

    @classmethod
    def whole(cls, total: int) -> "ShardSlice":
        return cls(total, 0, total)

    @property
    def size(self) -> int:
        return self.stop - self.start + self.pad

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.total
