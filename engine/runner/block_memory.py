"""KV caches and recurrent state of a runner, and their bytes between the device and host memory
(`core/kv_cache/tiers.py`).
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout, CopyRuns
from llmbox.kernels.ops import KVCache, Ops
from llmbox.kernels.recurrent import RecurrentState, copy_states

from ..checkpoint.tensor_io import bytes_of
from ..core.step import StepPlan
from ..device.device import Device, DeviceEvent
from ..kv_store.block_file import BlockKind, Checksums, zlib_checksums
from ..model.forward_context import ForwardContext


def _copy_runs(source: int, source_step: int, target: int, target_step: int, size: int, count: int) -> None:
    """Do what `Ops.copy_runs` does."""
    for run in range(count):
        ctypes.memmove(target + run * target_step, source + run * source_step, size)


class DeviceBlockMemory:
    """`BlockMemory` over the memory of one rank.

    Copies run on a separate stream, beside the steps that were launched. One to the host reads a block
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
        copy_runs: CopyRuns = _copy_runs,
    ) -> None:
        """`tensors`: [layers, blocks, ...] of each kind, contiguous; a block is `tensor[:, block]` of all."""
        self.checksums = checksums
        self._copy_runs = copy_runs
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
            for at, step, host, size, layers in self._runs(kind, index, into):
                self._copy_runs(at, step, host, size, size, layers)
        else:
            for block, part in self._parts(kind, index, into):
                self._copies.copy(block, part)
            self._has_saved = True

    def load(self, kind: BlockKind, index: int, data: memoryview) -> None:
        if self.device.type == "cpu":
            for at, step, host, size, layers in self._runs(kind, index, data):
                self._copy_runs(host, size, at, step, size, layers)
        else:
            self._copies.follow_steps()
            for block, part in self._parts(kind, index, data):
                self._copies.copy(part, block)

    def record(self) -> DeviceEvent:
        if self._has_saved:
            self._copies.hold_steps()
            self._has_saved = False
        return self._copies.record()

    def _runs(
        self, kind: BlockKind, index: int, data: memoryview
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield for each tensor: address of the first layer on the device, bytes to the next one, address in
        `data`, bytes of a layer, layers. torch would share a copy among its threads, and wait for them where
        the cores are busy.
        """
        host = ctypes.addressof(ctypes.c_ubyte.from_buffer(data))
        for tensor in self._tensors[kind]:
            layers, blocks = tensor.shape[:2]
            size = _block_bytes(tensor) // layers
            yield tensor.data_ptr() + index * size, blocks * size, host, size, layers
            host += layers * size

    def _parts(self, kind: BlockKind, index: int, data: memoryview) -> Iterator[tuple[Tensor, Tensor]]:
        memory: Tensor = data.obj.memory  # type: ignore[attr-defined]
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) - memory.data_ptr()
        for tensor in self._tensors[kind]:
            block, size = tensor[:, index], _block_bytes(tensor)
            host = memory[begin : begin + size]
            yield block, host.view(block.dtype).view(block.shape)
            begin += size


class ModelCaches:
    """KV caches and recurrent state of one runner."""

    def __init__(
        self,
        ops: Ops,
        kv: KVCache,
        window: KVCache | None = None,
        states: RecurrentState | None = None,
        *,
        has_window_blocks: bool = False,
    ) -> None:
        """`kv`: None for a draft head without keys. `window`: cache of sliding-window layers, if they have
        blocks of their own (`has_window_blocks`) or heads of another width. `states`: of a model with
        recurrent layers.
        """
        self.kv, self.window, self.states = kv, window, states
        self.has_window_blocks = has_window_blocks
        self._ops = ops
        self.full: list[KVCache] = [] if kv is None else [kv]
        """Caches whose blocks are those of `Request.block_table`, also of a draft head that follows."""
        if window is not None and not has_window_blocks:
            self.full.append(window)

    def add(self, cache: KVCache) -> None:
        """Copy and clear blocks in the cache of a draft head too."""
        self.full.append(cache)

    def copy(self, plan: StepPlan) -> None:
        """Make the copies of a step, before anything is written."""
        for cache in self.full:
            self._ops.copy_blocks(cache, plan.copies)
        if self.states is not None:
            copy_states(self.states, plan.state_copies)

    def clear(self, blocks: list[int], window_blocks: Callable[[], list[int]]) -> None:
        """Clear the blocks that a step begins. `window_blocks`: called for those of sliding-window layers."""
        if self.has_window_blocks:
            self._ops.clear_blocks(self.window, window_blocks())
        for cache in self.full if blocks else ():
            self._ops.clear_blocks(cache, blocks)

    def inputs(
        self, ids_T: Tensor, rope: tuple[Tensor, Tensor], layout: BatchLayout, windows: Iterable[int | None]
    ) -> ForwardContext:
        """Return the inputs of a forward pass. `rope`: rows of cos and sin. `windows`: of the layers."""
        sliding = self.kv if self.window is None else self.window
        plans = {
            window: self._ops.plan_attention(layout, self.kv if window is None else sliding, window)
            for window in windows
        }
        return ForwardContext(ids_T, *rope, self.kv, plans, self.window, layout, self.states)

    def memory(self, device: Device) -> DeviceBlockMemory:
        """Return access to the bytes of KV blocks and recurrent states."""
        tensors: dict[BlockKind, list[Tensor]] = {
            "kv": [each for cache in self.full for each in self._ops.block_tensors(cache)]
        }
        if self.has_window_blocks:
            tensors["window"] = self._ops.block_tensors(self.window)
        if self.states is not None:
            tensors["state"] = list(self.states.tensors)
        checksums, copy_runs = self._ops.checksums or zlib_checksums, self._ops.copy_runs or _copy_runs
        return DeviceBlockMemory(tensors, device, checksums, copy_runs)


def _block_bytes(tensor: Tensor) -> int:
    """Return the bytes of one block."""
    return tensor.numel() // tensor.shape[1] * tensor.element_size()
