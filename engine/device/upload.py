"""Batched host-to-device copies: many small arrays in one transfer."""

from array import array
from typing import Final

import torch
from torch import Tensor

from .device import Device

_DTYPES: Final = {"i": torch.int32, "q": torch.int64, "f": torch.float32, "d": torch.float64}
_ALIGNMENT: Final = 8


class Uploader:
    """Ring of host buffers for `steps` steps in flight: no buffer is written while a copy may read it."""

    def __init__(self, device: Device, steps: int, size: int = 1 << 16) -> None:
        self._device = device
        self._hosts = [device.host_memory(size, torch.uint8) for _ in range(steps)]
        self._turn = self._used = 0

    def begin_step(self) -> None:
        """Switch to the next buffer; the step that used it before must be done."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._used = 0

    def upload(self, *arrays: "array[int] | array[float]") -> list[Tensor]:
        """Copy the arrays to the device in one transfer; return a tensor for each."""
        places: list[tuple[int, int]] = []
        end = 0
        for numbers in arrays:
            size = len(numbers) * numbers.itemsize
            places.append((end, end + size))
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        host = self._room(end)
        for numbers, (start, stop) in zip(arrays, places, strict=True):
            if stop > start:
                host[start:stop] = torch.frombuffer(numbers, dtype=torch.uint8)
        target = torch.empty(end, dtype=torch.uint8, device=self._device.torch_device)
        self._device.copy(host, target)
        return [
            target[start:stop].view(_DTYPES[numbers.typecode])
            for numbers, (start, stop) in zip(arrays, places, strict=True)
        ]

    def _room(self, size: int) -> Tensor:
        if self._used + size > len(self._hosts[self._turn]):
            # Earlier copies of this step keep the old buffer.
            self._hosts[self._turn] = self._device.host_memory(2 * (self._used + size), torch.uint8)
            self._used = 0
        start, self._used = self._used, self._used + size
        return self._hosts[self._turn][start : start + size]


def from_array(numbers: "array[int]") -> Tensor:
    """View the array as a tensor without a copy: the array must not grow any more."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64 if numbers.typecode == "q" else torch.int32)
    return torch.frombuffer(numbers, dtype=torch.int64 if numbers.typecode == "q" else torch.int32)


def to_device(numbers: "array[int]", device: torch.device) -> Tensor:
    tensor = from_array(numbers)
    return tensor if device.type == "cpu" else move(tensor, device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously, through pinned memory; on a CPU return it as it is."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
