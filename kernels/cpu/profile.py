"""Time of the C++ operations by kind, counted while somebody asks for it, and the rates that bound it."""

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from ..op_types import KernelTime
from ..ops import Ops, PackedLinear
from .command_buffer import CommandRecorder
from .weight_packing import CPULinear

KINDS: Final = (
    "other operations",
    "linears",
    "experts",
    "attention",
    "RoPE and KV write",
    "norms",
    "activations",
    "recurrent layers",
    "sampling kernels",
)
"""Names of `OpKind` in native/threads/op_profile.h."""

_READ_PASSES: Final = 5
_PRODUCT_PASSES: Final = 40
_PRODUCT_ROWS: Final = 192
"""Rows of a block of the linears: the most that share a panel."""
_PRODUCT_INPUTS: Final = 512
_PRODUCT_OUTPUTS: Final = 512
"""Outputs for each thread: the weights of a thread stay in its L2 cache."""


class NativeTotals(ctypes.Structure):
    """Mirror of `OpTotals` in native/threads/op_profile.h."""

    _fields_ = tuple((name, ctypes.c_double) for name in ("seconds", "waited", "floor", "reading"))


class CPUProfiler:
    """Implements `KernelProfiler` over one library."""

    def __init__(self, library: ctypes.CDLL, recorder: CommandRecorder) -> None:
        self._library = library
        self._recorder = recorder
        self._totals = (NativeTotals * len(KINDS))()

    def start(self, read_rate: float, product_rate: float) -> None:
        address = self._library.llmbox_profile(1, read_rate, product_rate)
        self._totals = (NativeTotals * len(KINDS)).from_address(address)

    def stop(self) -> None:
        self._library.llmbox_profile(0, 0.0, 0.0)

    def seconds(self) -> float:
        return sum(float(total.seconds) for total in self._totals)

    def read(self) -> list[KernelTime]:
        # A thread that loses its core at the last barrier counts its wait beyond the end of the operation.
        return [
            KernelTime(name, total.seconds, min(total.waited, total.seconds), total.floor, total.reading)
            for name, total in zip(KINDS, self._totals, strict=True)
        ]

    @property
    def threads(self) -> int:
        return int(self._library.llmbox_threads_running())

    def read_rate(self, packed: PackedLinear) -> float:
        """Return the bytes a second at which all threads together read these packed weights; 0: not known."""
        if not isinstance(packed, CPULinear):
            return 0.0
        data = self._library.llmbox_packed(packed)
        size = self._library.llmbox_packed_bytes(packed)

        def read() -> None:
            self._recorder.launch(self._library.llmbox_read_op, 0, data, size, keeps=packed)

        return float(size) / _fastest(read, _READ_PASSES)

    def product_rate(self, ops: Ops) -> float:
        """Return the products a second of linears in the format of `ops`, with weights that caches hold."""
        outputs = _PRODUCT_OUTPUTS * self.threads
        packed = ops.pack_linear(torch.zeros(outputs, _PRODUCT_INPUTS, dtype=torch.bfloat16), None)
        x = torch.zeros(_PRODUCT_ROWS, _PRODUCT_INPUTS, dtype=torch.bfloat16)
        seconds = _fastest(partial(ops.linear, packed, x), _PRODUCT_PASSES)
        return outputs * _PRODUCT_INPUTS * _PRODUCT_ROWS / seconds


def _fastest(call: Callable[[], object], passes: int) -> float:
    times = []
    for _ in range(passes):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)
