"""Device of a runner (CUDA, host): pinned memory, asynchronous copies, events, batched uploads; CUDA's order.

`hardware/machine.py` defines the order, and an engine process sets it for CUDA before that starts
(`name_gpus`). Where CUDA was started first, its own order counts, and UUIDs identify the GPUs.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from ..hardware.machine import Machine, read_machine


class DeviceEvent(Protocol):
    @property
    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Block until all work queued on the device before the event is done."""
        ...


class CopyStream(Protocol):
    """In-order queue of copies beside the steps."""

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy as `Device.copy` does."""
        ...

    def follow_steps(self) -> None:
        """Have later copies wait for what the device was given so far."""
        ...

    def hold_steps(self) -> None:
        """Have what the device is given later wait for the copies so far."""
        ...

    def record(self) -> DeviceEvent:
        """Record an event after all copies queued so far."""
        ...


class Device(Protocol):
    """In-order work queue. Nothing blocks except `DeviceEvent.wait`."""

    torch_device: torch.device

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory [size] for asynchronous copies."""
        ...

    def copy(self, source: Tensor, destination: Tensor) -> None:
        """Copy between host and device.

        The host's side must stay untouched until an event recorded after it.
        """
        ...

    def record(self) -> DeviceEvent:
        """Record an event after all work queued so far."""
        ...

    def copy_stream(self) -> CopyStream:
        """Make a queue of copies that runs beside this one."""
        ...


class HostDevice:
    """CPU device: all work is done when the call returns."""

    torch_device = torch.device("cpu")
    is_done = True

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source)

    def record(self) -> "HostDevice":
        return self

    def wait(self) -> None:
        return

    def copy_stream(self) -> "HostDevice":
        return self

    def follow_steps(self) -> None:
        return

    def hold_steps(self) -> None:
        return


class CudaEvent:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Blocking: a spinning thread would take the core that the daemon's threads need.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    @property
    def is_done(self) -> bool:
        with torch.cuda.device(self._device):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        with torch.cuda.device(self._device):  # a new thread would create a context on the first GPU
            self._event.synchronize()


class CudaDevice:
    """Current stream of one GPU."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def copy(self, source: Tensor, destination: Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def record(self) -> CudaEvent:
        return CudaEvent(self.torch_device)

    def copy_stream(self) -> "CudaCopyStream":
        return CudaCopyStream(self.torch_device)


class CudaCopyStream:
    """Stream of one GPU beside its current one."""

    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]

    def copy(self, source: Tensor, destination: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def follow_steps(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def hold_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def record(self) -> CudaEvent:
        with torch.cuda.stream(self._stream):
            return CudaEvent(self._device)


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

    def upload_to(self, target: Tensor, numbers: "array[int]") -> None:
        """Copy an array to a contiguous tensor of the same size and type on the device."""
        host = self._room(-(-len(numbers) * numbers.itemsize // _ALIGNMENT) * _ALIGNMENT)
        host = host.view(target.dtype)
        host.copy_(torch.frombuffer(numbers, dtype=target.dtype))
        self._device.copy(host, target)

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


def to_host(numbers: Tensor, device: Device) -> Tensor:
    """Copy a device's numbers to host memory; valid after an event recorded later."""
    host = device.host_memory(numbers.numel(), numbers.dtype).view(numbers.shape)
    device.copy(numbers, host)
    return host


def to_device(numbers: "array[int]", device: torch.device) -> Tensor:
    tensor = from_array(numbers)
    return tensor if device.type == "cpu" else move(tensor, device)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device asynchronously, through pinned memory; on a CPU return it as it is."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def cuda_machine() -> Machine:
    """Read the machine, with GPUs in CUDA's order. Initializes CUDA."""
    return in_order(read_machine(), cuda_uuids())


def cuda_uuids() -> list[str]:
    properties = (torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count()))
    return [str(getattr(each, "uuid", "")) for each in properties]


def in_order(machine: Machine, uuids: Sequence[str]) -> Machine:
    """Restrict the machine to the GPUs with these UUIDs, in this order; unchanged where some are unknown."""
    places = {_bare(gpu.uuid): place for place, gpu in enumerate(machine.gpus)}
    order = [places[_bare(uuid)] for uuid in uuids if _bare(uuid) in places]
    if not order or len(order) < len(uuids):
        return machine
    number_of = {place: number for number, place in enumerate(order)}
    islands = ([number_of[place] for place in island if place in number_of] for island in machine.nvlink)
    return replace(
        machine,
        gpus=tuple(replace(machine.gpus[place], index=number) for number, place in enumerate(order)),
        nvlink=tuple(frozenset(island) for island in islands if len(island) > 1),
    )


def _bare(uuid: str) -> str:
    """Strip NVML's prefix, which CUDA's UUIDs do not have."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
