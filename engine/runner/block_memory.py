"""Bytes of KV blocks and recurrent states, between the device and host memory (`core/kv_cache/tiers.py`)."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from llmbox.kernels.ops import KVCache, Ops
from llmbox.kernels.recurrent import RecurrentState

from ..checkpoint.tensor_io import bytes_of
from ..device.device import Device, DeviceEvent
from ..kv_store.block_file import BlockKind, Checksums, zlib_checksums

_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""memmove that keeps the interpreter lock: `ctypes.memmove` gives it to the store's threads at each layer."""


class DeviceBlockMemory:
    """`BlockMemory` over the memory of one rank.

    Copies run on a stream of their own, beside the steps that were launched. One to the host reads a block
    that these do not write to, so it does not wait for them; steps launched after `record` wait for it, as
    they may overwrite the block. One to the device waits for the launched steps: a request that has ended
    since may still have a row in one, which writes to a block that was freed. On a CPU copies are done when
    the call returns.
    """

    def __init__(
        self,
        tensors: Mapping[BlockKind, Sequence[Tensor]],
        device: Device,
        checksums: Checksums = zlib_checksums,
    ) -> None:
        """`tensors`: [layers, blocks, ...] of each kind, contiguous; a block is `tensor[:, block]` of all."""
        self.checksums = checksums
        self._tensors = {kind: [each for each in parts if each.numel()] for kind, parts in tensors.items()}
        self._device, self._copies = device, device.copy_stream()
        self._has_saved = False
        self.sizes = {kind: sum(map(_block_bytes, parts)) for kind, parts in self._tensors.items()}
        """Bytes of one block of each kind."""

    @property
    def device(self) -> torch.device:
        return self._device.torch_device

    def make_buffer(self, size: int) -> memoryview:
        """Allocate host memory for copies, which lives as long as the view."""
        memory = self._device.host_memory(size, torch.uint8)
        view = bytes_of(memory)
        view.obj.memory = memory  # type: ignore[attr-defined]
        return view

    def save(self, kind: BlockKind, index: int, into: memoryview) -> None:
        if self.device.type == "cpu":
            for at, host, size in self._runs(kind, index, into):
                _move(host, at, size)
        else:
            for block, part in self._parts(kind, index, into):
                self._copies.copy(block, part)
            self._has_saved = True

    def load(self, kind: BlockKind, index: int, data: memoryview) -> None:
        if self.device.type == "cpu":
            for at, host, size in self._runs(kind, index, data):
                _move(at, host, size)
        else:
            self._copies.follow_steps()
            for block, part in self._parts(kind, index, data):
                self._copies.copy(part, block)

    def record(self) -> DeviceEvent:
        if self._has_saved:
            self._copies.hold_steps()
            self._has_saved = False
        return self._copies.record()

    def _runs(self, kind: BlockKind, index: int, data: memoryview) -> Iterator[tuple[int, int, int]]:
        """Yield address on the device, address in `data` and bytes of each layer. torch would share a copy
        among its threads, and wait for them where the cores are busy.
        """
        host = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
        for tensor in self._tensors[kind]:
            layers, blocks = tensor.shape[:2]
            size = _block_bytes(tensor) // layers
            for layer in range(layers):
                yield tensor.data_ptr() + (layer * blocks + index) * size, host, size
                host += size

    def _parts(self, kind: BlockKind, index: int, data: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        memory: Tensor = data.obj.memory  # type: ignore[attr-defined]
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) - memory.data_ptr()
        for tensor in self._tensors[kind]:
            block, size = tensor[:, index], _block_bytes(tensor)
            host = memory[begin : begin + size]
            yield block, host.view(block.dtype).view(block.shape)
            begin += size


def block_memory(
    ops: Ops,
    caches: Sequence[KVCache],
    window_cache: KVCache | None,
    states: RecurrentState | None,
    device: Device,
) -> DeviceBlockMemory:
    """Return access to the memory of a runner. `window_cache`: with blocks of its own."""
    tensors: dict[BlockKind, list[Tensor]] = {
        "kv": [each for cache in caches for each in ops.block_tensors(cache)]
    }
    if window_cache is not None:
        tensors["window"] = ops.block_tensors(window_cache)
    if states is not None:
        tensors["state"] = list(states.tensors)
    return DeviceBlockMemory(tensors, device, ops.checksums or zlib_checksums)


def _block_bytes(tensor: Tensor) -> int:
    """Return the bytes of one block."""
    return tensor.numel() // tensor.shape[1] * tensor.element_size()
