"""Triton's interpreter for tests: on before Triton is first imported, and three faults of it put right.

Triton reads TRITON_INTERPRET as its own functions are decorated, so it cannot be turned on later.
"""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def turn_on() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    if getattr(interpreter, "_llmbox_patched", False):
        return
    patch_tensor, convert_float = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch(tensor: Any, scope: Any) -> None:
        """Triton 3.6 turns arrays of one element into loop bounds by int(), which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Triton 3.6 loses the carry when rounding to E4M3 reaches the next power of two."""
        if str(target) != "fp8e4nv" or str(source) != "fp32":
            return convert_float(numbers, source, target, rounding)
        return torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def multiply(a: Any, b: Any, dtype: Any) -> Any:
        """Let bits of a row not depend on its place in the tile, as some BLAS kernels for float32 do."""
        if dtype != np.float32:
            return np.matmul(a, b, dtype=dtype)
        return np.matmul(a, b, dtype=np.float64).astype(np.float32)

    interpreter._patch_lang_tensor, interpreter._convert_float = patch, convert
    interpreter.np = SimpleNamespace(**{**vars(np), "matmul": multiply})
    interpreter._llmbox_patched = True
