"""Command buffer: operations run at once, or are recorded and later run by one call.

eager       each operation is made, run and freed; results are new tensors
recording   operations join the buffer; results are buffers of `capacity` rows that it owns
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..lora import LoraRows
from ..op_types import BatchLayout
from ..ops import StepInputs
from .ffi import Step
from .weight_packing import DTYPES


class CommandBuffer:
    """Recorded operations and the objects that their pointers refer to. `capacity`: most rows of a step."""

    def __init__(self, library: ctypes.CDLL, capacity: int, angles: list[int]) -> None:
        """Start an empty buffer. `angles` holds the addresses of the recorded step's RoPE tables."""
        self.capacity = capacity
        self.angles = angles
        self._library = library
        self._ops: list[int] = []
        self._calls: list[tuple[int, Callable[..., None], tuple[Tensor, ...]]] = []
        """(number of operations before it, function, its tensors) of each host callback."""
        self._kept: list[Any] = []
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._array: Any = None

    def add(self, op: int, *kept: Any) -> None:
        self._ops.append(op)
        self._kept.append(kept)

    def host_callback(self, function: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
        self._calls.append((len(self._ops), function, tensors))

    def buffer(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        """Return the result buffer of an operation and shape: it is valid until the operation runs again (see
        `Ops`).
        """
        key = name, width, dtype
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self.capacity, width, dtype=dtype)
        return self._buffers[key]

    def run(self, step: Step) -> None:
        if self._array is None:
            self._array = (ctypes.c_void_p * len(self._ops))(*self._ops)
        if not self._calls:
            self._library.llmbox_run(self._array, len(self._ops), step)
            return
        done = 0
        for end, function, tensors in self._calls:
            self._run(done, end, step)
            function(*(tensor[: step.rows] for tensor in tensors))
            done = end
        self._run(done, len(self._ops), step)

    def _run(self, start: int, end: int, step: Step) -> None:
        if start < end:
            size = end - start
            part = (ctypes.c_void_p * size).from_buffer(self._array, start * ctypes.sizeof(ctypes.c_void_p))
            self._library.llmbox_run(part, size, step)

    def __del__(self) -> None:
        for op in self._ops:
            self._library.llmbox_op_free(op)


class CommandRecorder:
    """Target of all operations: runs them at once, or records them while `recording`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._commands: CommandBuffer | None = None

    @contextmanager
    def recording(self, capacity: int, cos_ATD: Tensor) -> Iterator[CommandBuffer]:
        """Record operations into a new buffer for steps of at most `capacity` rows."""
        assert self._commands is None
        self._commands = CommandBuffer(self.library, capacity, [cos_TD.data_ptr() for cos_TD in cos_ATD])
        try:
            yield self._commands
        finally:
            self._commands = None

    def table_of(self, cos_TD: Tensor) -> int:
        """Return the index of a RoPE table among the step's. An eager operation is given only its own."""
        return 0 if self._commands is None else self._commands.angles.index(cos_TD.data_ptr())

    def result(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return a result tensor: a new one, or the buffer's of the operation."""
        if self._commands is not None:
            return self._commands.buffer(name, width, dtype)
        return torch.empty(rows, width, dtype=dtype)

    def host_callback(self, function: Callable[..., None], tensors: tuple[Tensor, ...]) -> None:
        if self._commands is not None:
            self._commands.host_callback(function, tensors)
        else:
            function(*tensors)

    def scratch(self, name: str, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return self.result(f"states {name}", len(like), width, dtype)

    def submit(self, op: int, step: Step, *kept: Any) -> None:
        """Run an operation with `step`, or record it: a recorded one gets the step of each run."""
        if self._commands is not None:
            self._commands.add(op, *kept)
            return
        self.library.llmbox_run((ctypes.c_void_p * 1)(op), 1, step)
        self.library.llmbox_op_free(op)

    def copy(self, into_TND: Tensor, from_TND: Tensor) -> None:
        """Copy rows of parts, strided in both first dimensions."""
        assert from_TND.stride(2) == into_TND.stride(2) == 1
        rows, heads, width = from_TND.shape
        read = from_TND, *from_TND.stride()[:2], heads, width
        written = into_TND, *into_TND.stride()[:2]
        self.launch(self.library.llmbox_copy_op, rows, DTYPES[from_TND.dtype], *read, *written)

    def launch(self, make: Callable[..., int], step: Step | int, *arguments: Any, keeps: Any = None) -> None:
        """Submit the operation that `make`, a function of the library, makes of these arguments. `step`: or
        the number of its rows. The arguments stay alive as long as the operation, and so does `keeps`.
        """
        step = Step(rows=step) if isinstance(step, int) else step
        self.submit(make(*arguments), step, arguments, keeps)


class CPUOperations:
    """Base of operations of one kernel library."""

    def __init__(self, recorder: CommandRecorder) -> None:
        self.library, self.recorder = recorder.library, recorder


MIN_ROWS = 64
"""Rows of the smallest buffer. A larger step records a larger one."""


class CommandGraph:
    """Forward pass, recorded at its first call and again when a step has more rows than the buffer's
    capacity.
    """

    def __init__(self, recorder: CommandRecorder, body: Callable[[StepInputs], tuple[Tensor, ...]]) -> None:
        self._recorder = recorder
        self._body = body
        self._commands: CommandBuffer | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self._last: tuple[int, tuple[Tensor, ...]] = 0, ()
        """Rows of the last step, and its outputs: a view takes longer to make than to keep."""

    def __call__(self, inputs: StepInputs) -> tuple[Tensor, ...]:
        rows = len(inputs.ids_T)
        if self._commands is None or rows > self._commands.capacity:
            self._commands, self._outputs = None, ()  # freed before the larger one is made
            self._last = 0, ()
            capacity = max(MIN_ROWS, 1 << (rows - 1).bit_length())
            with self._recorder.recording(capacity, inputs.cos_ATD) as commands:
                self._outputs = self._body(inputs)
            self._commands = commands
        step = ragged_step(rows, next(iter(inputs.plans.values())).ragged)
        step.ids = inputs.ids_T.data_ptr()
        step.use_angles(inputs.cos_ATD, inputs.sin_ATD)
        self._commands.run(step)
        if self._last[0] != rows:
            self._last = rows, tuple(output[:rows] for output in self._outputs)
        return self._last[1]


def ragged_step(rows: int, ragged: BatchLayout) -> Step:
    """Build the C++ step. `ragged` must stay alive until the step has run."""
    states, window = ragged.states, ragged.window
    step = Step(
        rows=rows,
        sequences=len(ragged.query_lens),
        block_size=ragged.block_size,
        table_width=ragged.block_tables_NB.shape[1],
        query_starts=ragged.query_starts_N1.data_ptr(),
        contexts=ragged.context_lens_N.data_ptr(),
        block_tables=ragged.block_tables_NB.data_ptr(),
        slots=ragged.slots_T.data_ptr(),
        window_tables=None if window is None else window.block_tables_NB.data_ptr(),
        window_slots=None if window is None else window.slots_T.data_ptr(),
        state_slots=None if states is None else states.slots_N.data_ptr(),
        save_starts=None if states is None else states.save_starts_N1.data_ptr(),
        save_rows=None if states is None else states.save_rows.data_ptr(),
        save_slots=None if states is None else states.save_slots.data_ptr(),
    )
    if ragged.adapters is not None:
        assert isinstance(ragged.adapters, LoraRows)
        step.use_adapters(ragged.adapters)
    if ragged.spans_N is not None:
        step.spans = ragged.spans_N.data_ptr()
    return step
