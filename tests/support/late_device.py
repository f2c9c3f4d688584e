"""A device that is late, and graphs that are functions: what a GPU does to careless code, on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmbox.engine.core.engine import Engine
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.device.device import Device
from llmbox.engine.runner.block_memory import ModelCaches
from llmbox.engine.runner.cuda_graphs import CudaCapture
from llmbox.engine.runner.draft_head import DeviceHeadRunner
from llmbox.engine.runner.draft_model import DraftModel
from support.real_engines import load, runner_of


class LateDevice:
    """Results arrive when an event after them is waited for, and not before; and until then the host's side
    of a copy to the device must stay as it was.
    """

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._host: list[Tensor] = []
        self.under_way: list[Callable[[], None]] = []
        self.waits = 0

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        memory = torch.empty(size, dtype=dtype)
        self._host.append(memory)
        return memory

    def copy(self, source: Tensor, destination: Tensor) -> None:
        if self._is_host(source):
            destination.copy_(source)
            self.under_way.append(Untouched(source))
        else:
            assert self._is_host(destination)
            self.under_way.append(Arrival(source.clone(), destination))
            destination.fill_(torch.nan if destination.is_floating_point() else -1)

    def record(self) -> "LateEvent":
        # In one operation: a thread that answers may wait for an older event, and empty the list, meanwhile.
        return LateEvent(self, self.under_way[-1:])

    def _is_host(self, tensor: Tensor) -> bool:
        pointer = tensor.untyped_storage().data_ptr()
        return any(memory.untyped_storage().data_ptr() == pointer for memory in self._host)


class Untouched:
    def __init__(self, source: Tensor) -> None:
        self._source, self._seen = source, source.clone()

    def __call__(self) -> None:
        assert torch.equal(self._source, self._seen), "changed while the device was reading it"


class Arrival:
    def __init__(self, source: Tensor, destination: Tensor) -> None:
        self._source, self._destination = source, destination

    @torch.inference_mode()
    def __call__(self) -> None:
        self._destination.copy_(self._source)


class LateEvent:
    def __init__(self, device: LateDevice, last: list[Callable[[], None]]) -> None:
        """`last`: what was given to the device before it; nothing where all of that is done."""
        self._device, self._end = device, next(iter(last), None)

    def wait(self) -> None:
        self._device.waits += 1
        queue = self._device.under_way
        while self._end is not None and self._end in queue:
            queue.pop(0)()


class FakeCapture:
    """A graph is the function itself."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        self.bytes_taken = 0
        self.replays = 0
        self._fail_at = fail_at

    def capture(self, body: Callable[[], None], *, is_warm: bool = False) -> Callable[[], None]:
        if not is_warm:
            body()
        if self._fail_at == self.bytes_taken:
            raise RuntimeError("no room for this graph")
        self.bytes_taken += 1

        def replay() -> None:
            self.replays += 1
            body()

        return replay


def device_engine(
    directory: Path,
    device: Device | None = None,
    capture: CudaCapture | None = None,
    graphs_bytes: int = 1 << 30,
    **options: Any,
) -> Engine:
    """As `load` with a runner that launches steps ahead, on this device, as those of draft models and heads
    do.
    """
    plain = load(directory, **{"speculate": "off", "overlap": True, **options})
    local, scheduler = runner_of(plain), plain.scheduler
    device = device or LateDevice()

    def remake(local: Any, capture: CudaCapture | None, **parts: Any) -> Any:
        old = local.caches
        caches = ModelCaches(
            local._ops, old.kv, old.window, old.states, has_window_blocks=old.has_window_blocks
        )
        shared = (local._model, local._rotary, caches, device, local._sizes, capture, graphs_bytes)
        return type(local)(*shared, **parts)

    runner, pool = remake(local, capture, images=local.images), scheduler.pool
    for each in local.proposers:
        beside = remake(each.executor, None if capture is None else FakeCapture())
        if isinstance(beside, DeviceHeadRunner):
            beside.follow(runner, each.method, local._model._tapped)
        else:
            runner.proposers.append(DraftModel(beside, pool.num_blocks, pool.block_size))
    fresh = BlockPool(pool.num_blocks, pool.block_size, enable_prefix_cache=pool.caching)
    config, images = scheduler.config, scheduler.images
    return Engine(Scheduler(config, fresh, images=images, proposers=runner.proposers), runner, plain.info)
