"""Handles of C++ objects that Python owns."""

import ctypes
from collections.abc import Callable

import torch

from ..quant import Quant

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""As in native/library.cpp."""


class Handle:
    def __init__(self, pointer: int | None, free: Callable[[int], None]) -> None:
        if not pointer:
            raise MemoryError("the CPU kernels could not get the memory they asked for")
        self.pointer = pointer
        self._free = free

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self.pointer)


class Linear(Handle):
    """Packed weights of a linear; `quant` None keeps the dtype they have."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        quant: Quant | None = None,
    ) -> None:
        self.outputs, self.inputs = weight_OI.shape
        self.dtype = weight_OI.dtype
        self.quant = quant
        weight = weight_OI.contiguous()
        bias = None if bias_O is None else bias_O.float().contiguous()
        numbers = DTYPES[self.dtype], self.inputs, self.outputs
        arrays = weight.data_ptr(), None if bias is None else bias.data_ptr()
        if quant is None:
            made = library.llmbox_linear_new(*numbers, *arrays)
        else:
            made = library.llmbox_quant_new(*numbers, quant.bits, quant.group, *arrays)
        super().__init__(made, library.llmbox_linear_free)
