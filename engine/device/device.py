"""The few things that differ between a device that works on its own and one that works while called."""

from typing import Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    def wait(self) -> None:
        """Until everything that was given to the device before the event is done."""
        ...


class Device(Protocol):
    """One queue: what is given to it runs in order. Nothing here waits, but `DeviceEvent.wait`."""

    torch_device: torch.device

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size], from where copies need not wait."""
        ...

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Between the host and the device. The host's side stays untouched until an event after it."""
        ...

    def record(self) -> DeviceEvent: ...


class HostDevice:
    """The CPU: everything is done when the call returns."""

    torch_device = torch.device("cpu")

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source)

    def record(self) -> "HostDevice":
        return self

    def wait(self) -> None:
        return


class CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Blocking: a thread that spins would take the core that the daemon's threads need.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        with torch.cuda.device(self._device):  # a thread begins with the first GPU, and would open it
            self._event.synchronize()


class CudaDevice:
    """The current stream of one GPU."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def record(self) -> CudaEvent:
        return CudaEvent(self.torch_device)
