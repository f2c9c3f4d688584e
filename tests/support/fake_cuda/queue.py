"""What the device has still to do, who waited for it, and what a graph has recorded."""

import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], None]
OURS = ("/engine/", "/kernels/")


@dataclass
class Queue:
    """One for all streams. Copies on another stream than that of the steps read and write the device as late
    as they may; other order between streams is not looked at.
    """

    under_way: list[Call] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """What was waited for, and from which line of ours; waits for events are not among them."""
    event_waits: int = 0
    recording: list[Call] | None = None
    poison: list[Tensor] = field(default_factory=list)
    is_beside: bool = False
    """True while another stream than that of the steps is current."""
    is_strict: bool = False
    """True while waits are refused (`torch.cuda.set_sync_debug_mode`)."""
    launches: int = 0
    """Kernels, operations and copies given to the device; a graph is one."""

    def wait(self, what: str) -> None:
        """The host waits for everything."""
        if self.is_strict:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        if self.recording is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.waits.append(f"{what} at {_place()}")
        self.drain(None)

    def drain(self, end: Call | None) -> None:
        """Up to `end`, or all."""
        while self.under_way and (end is None or end in self.under_way):
            self.under_way.pop(0)()

    def hold_steps(self) -> None:
        """The steps wait for the other streams."""
        for call in self.under_way:
            if isinstance(call, LateArrival):
                call.read()

    def launch(self, call: Call, results: list[Tensor]) -> None:
        """`call` runs it once more, with these results; it has run already."""
        if self.recording is None:
            self.launches += 1
        else:
            self.recording.append(call)
            self.poison += results

    @contextmanager
    def outside_graphs(self) -> Any:
        recording, self.recording = self.recording, None
        try:
            yield
        finally:
            self.recording = recording


@dataclass(eq=False)
class Untouched:
    """The host's side of a copy to the device."""

    source: Tensor
    seen: Tensor

    def __call__(self) -> None:
        same = torch.equal(self.source.view(torch.uint8), self.seen.view(torch.uint8))
        assert same, "changed while the device was reading it"


@dataclass(eq=False)
class Arrival:
    source: Tensor
    destination: Tensor

    @torch.inference_mode()
    def __call__(self) -> None:
        self.destination.copy_(self.source)


class LateArrival(Arrival):
    """Copy to the host on another stream: it reads when it runs, at the latest when steps wait for it."""

    @torch.inference_mode()
    def read(self) -> None:
        if not self.has_read:
            self.source, self.has_read = self.source.clone(), True

    has_read = False


class Departure(Arrival):
    """Copy to the device on another stream."""


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self, queue: Queue, on_end: Call) -> None:
        self._queue, self._on_end = queue, on_end
        self._calls: list[Call] | None = None

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global", **_: object) -> None:
        assert capture_error_mode in {"global", "thread_local", "relaxed"}
        assert self._queue.recording is None
        self._queue.recording, self._queue.poison = [], []

    def capture_end(self) -> None:
        """Nothing was computed while it was recorded: what was is spoilt."""
        self._calls, self._queue.recording = self._queue.recording, None
        assert self._calls, "an empty graph"
        for tensor in self._queue.poison:
            if tensor.is_floating_point():
                tensor.view(torch.uint8 if tensor.itemsize == 1 else tensor.dtype).fill_(
                    255 if tensor.itemsize == 1 else torch.nan
                )
        self._queue.poison = []
        self._on_end()

    @torch.inference_mode()
    def replay(self) -> None:
        assert self._calls is not None
        self._queue.launches += 1
        for call in self._calls:
            call()

    def pool(self) -> tuple[int, int]:
        return (0, 1)


def _place() -> str:
    frames = [frame for frame in traceback.extract_stack() if any(part in frame.filename for part in OURS)]
    frames = [frame for frame in frames if "/tests/" not in frame.filename] or traceback.extract_stack()[:-3]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}"
