"""`torch.cuda`'s own names in their place, for as long as `fake_cuda` lasts."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch

from support.fake_nvml import FakeGpu, FakeNvml
from support.triton_interpreter import turn_on

from .card import Card
from .queue import Call, Graph, Queue
from .tensors import GPU, GpuTensor, Operations, bare

PROBED = 32
"""Numbers: what a backend runs before all else, to see that kernels compute something, has no more
(`kernels/triton/backend.py::why_it_fails`).
"""


class Stream:
    """In place of `torch.cuda.Stream`."""

    _numbers = itertools.count(1)
    current: "Stream"
    of_steps: "Stream"

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        del device, priority
        self.cuda_stream = next(Stream._numbers)
        self.device = GPU

    def wait_stream(self, stream: "Stream") -> None:
        assert isinstance(stream, Stream)
        if self is Stream.of_steps and stream is not self:
            Operations.current.queue.hold_steps()

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        Operations.current.queue.wait("a stream")


class Event:
    """In place of `torch.cuda.Event`: the times between two are a millisecond."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        del blocking, interprocess
        self._timed = enable_timing
        self._end: Call | None = None
        self._recorded = False
        self._asked = 0

    def record(self, stream: Stream | None = None) -> None:
        del stream
        self._end, self._recorded = next(iter(Operations.current.queue.under_way[-1:]), None), True

    def query(self) -> bool:
        """It is done when it is asked for the third time."""
        queue, self._asked = Operations.current.queue, self._asked + 1
        if self._asked > 2 and self._end in queue.under_way:
            queue.drain(self._end)
        return self._end not in queue.under_way

    def synchronize(self) -> None:
        queue = Operations.current.queue
        queue.event_waits += 1
        if self._end is not None and self._end in queue.under_way:
            queue.drain(self._end)

    def elapsed_time(self, end: "Event") -> float:
        assert self._timed
        assert end._timed
        assert self._recorded
        assert end._recorded
        return 1.0


@contextmanager
def fake_cuda(card: Card | None = None, *, nvml: bool = True, blank: bool = False) -> Iterator[Operations]:
    """Everything in this thread sees one GPU; `card` and `queue` of what is given tell what was done with it.

    `blank`: kernels compute nothing, for many or large ones; new memory is zeros.
    """
    turn_on()
    torch._C._ensureCUDADeviceGuardSet()
    card, queue = card or Card(), Queue()
    operations = Operations(card, queue, blank=blank)
    Stream.current = Stream.of_steps = Stream()
    with ExitStack() as stack:
        for name, stand_in in _cuda(card, queue).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        _patch_graphs(stack, card, queue)
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", _pin_by(operations)))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _numbered(torch.Tensor.to)))
        stack.enter_context(mock.patch.object(torch, "tensor", _from_data(torch.tensor)))
        stack.enter_context(mock.patch.object(torch, "empty", _pinned_by_any_thread(torch.empty, operations)))
        _patch_interpreter(stack, queue, blank=blank)
        _patch_attention(stack)
        _clear_caches()
        stack.callback(_clear_caches)
        driver: Any = _Driver(card) if nvml else FakeNvml([], init_error="NVMLError_LibraryNotFound")
        stack.enter_context(_in_place_of("pynvml", driver))
        stack.enter_context(mock.patch("llmbox.engine.hardware.machine.torch_has_cuda", return_value=True))
        stack.enter_context(operations)
        yield operations


@contextmanager
def _in_place_of(name: str, module: Any) -> Iterator[None]:
    """Only this entry: `mock.patch.dict` would also forget modules that were imported meanwhile, and a second
    import makes their classes anew.
    """
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


class _Driver(FakeNvml):
    """NVML of this card."""

    def __init__(self, card: Card) -> None:
        super().__init__([])
        self._card = card

    @property
    def gpus(self) -> list[FakeGpu]:  # type: ignore[override]
        return [FakeGpu(self._card.name, self._card.total, self._card.total - self._card.free)]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802 - NVML's name
        assert uuid == f"GPU-{self._card.uuid}"
        return self.gpus[0]

    @gpus.setter
    def gpus(self, _: object) -> None:
        pass


def _cuda(card: Card, queue: Queue) -> dict[str, Any]:
    def free() -> tuple[int, int]:
        card.open()
        return card.free, card.total

    def empty_cache() -> None:
        queue.wait("cudaFree")
        card.empty_cache()

    def current(stream: Stream | None) -> Any:
        @contextmanager
        def inside() -> Iterator[None]:
            before = Stream.current
            Stream.current = stream or before
            queue.is_beside = Stream.current is not Stream.of_steps
            yield
            Stream.current = before
            queue.is_beside = before is not Stream.of_steps

        return inside()

    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.total,
        multi_processor_count=card.multiprocessors,
        major=card.capability[0],
        minor=card.capability[1],
        uuid=card.uuid,
        is_integrated=False,
    )
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: card.open(),
        "device": lambda _device: ExitStack(),
        "get_device_properties": lambda _device=None: properties,
        "get_device_capability": lambda _device=None: card.capability,
        "get_device_name": lambda _device=None: card.name,
        "mem_get_info": lambda _device=None: free(),
        "memory_allocated": lambda _device=None: card.allocated,
        "max_memory_allocated": lambda _device=None: card.peak,
        "memory_reserved": lambda _device=None: card.reserved,
        "max_memory_reserved": lambda _device=None: card.reserved_peak,
        "reset_peak_memory_stats": lambda _device=None: card.reset_peaks(),
        "empty_cache": empty_cache,
        "synchronize": lambda _device=None: queue.wait("synchronize"),
        "set_sync_debug_mode": lambda mode: setattr(queue, "is_strict", mode == "error"),
        "Stream": Stream,
        "Event": Event,
        "stream": current,
        "current_stream": lambda _device=None: Stream.current,
        "is_current_stream_capturing": lambda: queue.recording is not None,
        "graph_pool_handle": lambda: (0, 1),
    }


def _patch_graphs(stack: ExitStack, card: Card, queue: Queue) -> None:
    def taken() -> None:
        card.graphs += 1

    class CardsGraph(Graph):
        def __init__(self) -> None:
            super().__init__(queue, taken)

    stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", CardsGraph))
    for name in ("_cuda_endAllocateToPool", "_host_emptyCache"):  # not in a PyTorch without CUDA
        stack.enter_context(mock.patch.object(torch._C, name, mock.Mock(return_value=None), create=True))


def _pin_by(operations: Operations) -> Any:
    """A method: what is bound to another object already would lose its tensor."""

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        return operations.pinned_copy(self)

    return pin_memory


def _numbered(to: Any) -> Any:
    """A PyTorch without CUDA cannot tell the current GPU."""

    def number(each: Any) -> Any:
        is_device = isinstance(each, str | torch.device)
        return GPU if is_device and torch.device(each).type == "cuda" else each

    def numbered(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(self, *map(number, args), **{name: number(each) for name, each in kwargs.items()})

    return numbered


def _from_data(tensor: Any) -> Any:
    """Made on the host and copied, as it is in C++, where no mode hears of it."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        found = tensor(data, **kwargs)
        return found if device is None else found.to(device)

    return made


def _pinned_by_any_thread(empty: Any, operations: Operations) -> Any:
    """Threads of the KV store allocate pinned memory too, and a mode hears of its own thread alone."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        found = empty(*args, **kwargs)
        return operations.pin(found) if pin_memory else found

    return made


class Generator(torch._C.Generator):
    """Of the CPU whatever was asked for."""

    def __new__(cls, _device: Any = None) -> Self:
        return super().__new__(cls, device="cpu")


def _patch_interpreter(stack: ExitStack, queue: Queue, *, blank: bool) -> None:
    """Kernels find the numbers themselves, and are what graphs record."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        for each in (*args, *kwargs.values()):
            cpu = isinstance(each, torch.Tensor) and not isinstance(each, GpuTensor)
            assert not cpu, "Pointer argument cannot be accessed from Triton (cpu tensor?)"
        args, kwargs = tuple(map(bare, args)), {name: bare(each) for name, each in kwargs.items()}

        sizes = [each.numel() for each in args if isinstance(each, torch.Tensor)]

        def again() -> None:
            if blank and max(sizes) > PROBED:
                return
            with torch.utils._python_dispatch._disable_current_modes():
                run(self, *args, **kwargs)

        with queue.outside_graphs():
            again()
        queue.launch(again, [])

    stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))


def _patch_attention(stack: ExitStack) -> None:
    """No kernels of torch's own; a bias is a tensor of another class, which no mode may make."""
    from torch.nn.attention import bias

    make = bias.causal_lower_right

    def outside(*size: int) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return make(*size)

    stack.enter_context(mock.patch.object(bias, "causal_lower_right", outside))
    for name in ("can_use_flash_attention", "can_use_efficient_attention"):
        stack.enter_context(mock.patch.object(bias, name, mock.Mock(return_value=False)))


def _clear_caches() -> None:
    from llmbox.kernels.triton.linear import tile_config as tiles

    tiles.capability.cache_clear()
    tiles.multiprocessors.cache_clear()
