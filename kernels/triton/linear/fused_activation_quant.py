"""Fused activation quantization: norms, gates and attention also write 8-bit rows for the next linear.

The rows are found by the identity of the unquantized result. Where all linears have the same format, every
producer writes it. Where each linear has a static scale of its own, the first step shows which linear reads
which result: until then linears quantize their rows themselves, to the same bits. That step also shows which
results unquantized linears read; no 8-bit rows are written for these from then on.
"""

from collections.abc import Callable
from weakref import ref

from torch import Tensor

from .linear import DenseLinear, Fp8Linear, Linear
from .quantize_activations import RowFormat, Rows8


class FusedActivationQuant:
    def __init__(self, row_format: RowFormat | None) -> None:
        """Start without knowledge. `row_format` is the format of all linears; None: no linear has one, or
        each its own.
        """
        self._for_all = row_format
        self._learned: dict[int, RowFormat] = {}
        """Format by producer: the identity of a norm's weight, or of the linear before a gate. Both live as
        long as the model.
        """
        self._unread: set[int] = set()
        """Producers whose results unquantized linears read."""
        self._wide: Callable[[], Tensor | None] = lambda: None
        self._eight: Rows8 | None = None
        self._format: RowFormat | None = None
        self._maker = 0
        self._product: Callable[[], Tensor | None] = lambda: None
        self._product_of = 0

    def format_of(self, maker: int) -> RowFormat | None:
        """Return the 8-bit format that a producer should write; None: none."""
        for_all = None if maker in self._unread else self._for_all
        return for_all or self._learned.get(maker)

    def keep(self, wide: Tensor, eight: Rows8 | None, maker: int) -> Tensor:
        """Remember the result of a producer and its quantized rows."""
        self._wide, self._eight, self._maker = ref(wide), eight, maker
        self._format = self.format_of(maker)
        return wide

    def rows_for(self, packed: Linear, x: Tensor) -> Rows8 | None:
        """Return the quantized rows of `x` if they were written in the format of `packed`, and learn who
        reads `x`.
        """
        if self._wide() is not x:
            return None
        if isinstance(packed, DenseLinear):
            self._unread.add(self._maker)
            return None
        if not isinstance(packed, Fp8Linear) or packed.given is None:
            return self._eight
        if self._format is not None and self._format.given is packed.given:
            return self._eight
        if self._maker:
            self._learned[self._maker] = packed.row_format
        return None

    def remember_product(self, packed: Linear, out: Tensor) -> Tensor:
        """Remember the result of a linear, for the gate after it."""
        self._product, self._product_of = ref(out), id(packed)
        return out

    def producer_of(self, product: Tensor) -> int:
        """Return the identity of the linear that computed `product` last; 0 if none did."""
        return self._product_of if self._product() is product else 0
