"""Handles of C++ objects that Python owns."""

import ctypes
from collections.abc import Callable

import torch

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
    def __init__(self, library: ctypes.CDLL, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.outputs, self.inputs = weight_OI.shape
        self.dtype = weight_OI.dtype
        bias = None if bias_O is None else bias_O.float().contiguous()
        super().__init__(
            library.llmbox_linear_new(
                DTYPES[self.dtype],
                self.inputs,
                self.outputs,
                weight_OI.contiguous().data_ptr(),
                None if bias is None else bias.data_ptr(),
            ),
            library.llmbox_linear_free,
        )
