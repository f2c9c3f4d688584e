"""Fused activation quantization: norms, gates and attention also write 8-bit rows for the next linear.

`Ops.before` says which linear that is, and with it the format.
"""

from collections.abc import Callable
from weakref import ref

from torch import Tensor

from .linear import Linear, row_format_of
from .quantize_activations import RowFormat, Rows8


class FusedActivationQuant:
    """Quantized rows of the last result that an operation wrote with some."""

    def __init__(self) -> None:
        self._result: Callable[[], Tensor | None] = lambda: None
        self._rows: Rows8 | None = None
        self._format: RowFormat | None = None

    def keep(self, result: Tensor, rows: Rows8 | None, row_format: RowFormat | None) -> Tensor:
        """Keep the quantized rows of `result` until the next one; return `result`."""
        self._result, self._rows, self._format = ref(result), rows, row_format
        return result

    def rows_for(self, packed: Linear, x: Tensor) -> Rows8 | None:
        """Return the quantized rows of `x` if they were written in the format of `packed`."""
        if self._rows is None or self._format is None or self._result() is not x:
            return None
        return self._rows if self._format.matches(row_format_of(packed)) else None
