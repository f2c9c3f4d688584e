"""Rows that norms, gates and attention leave in 8 bits too, for the linear that reads them next.

They are found by the identity of the wide result. Where all linears want the same format, each of them leaves
that. Where each linear has a scale of its own (a checkpoint with static activations), which one reads what
shows in the first step: until then linears round their rows, to the same bits. In that step it also shows
what a wide linear reads, for which nothing is left from then on.
"""

from collections.abc import Callable
from weakref import ref

from torch import Tensor

from .linear import DenseLinear, Fp8Linear, Linear
from .quantize_activations import RowFormat, Rows8


class FusedActivationQuant:
    def __init__(self, row_format: RowFormat | None) -> None:
        """`row_format`: what all linears want; None: nothing, or each its own."""
        self._for_all = row_format
        self._learned: dict[int, RowFormat] = {}
        """By the identity of a norm's weight, or of the linear before a gate: those stay with the model."""
        self._unread: set[int] = set()
        """The same of those whose results wide linears read."""
        self._wide: Callable[[], Tensor | None] = lambda: None
        self._eight: Rows8 | None = None
        self._format: RowFormat | None = None
        self._maker = 0
        self._product: Callable[[], Tensor | None] = lambda: None
        self._product_of = 0

    def format_of(self, maker: int) -> RowFormat | None:
        """What is to be left by the norm of that weight, by the gate after that linear."""
        for_all = None if maker in self._unread else self._for_all
        return for_all or self._learned.get(maker)

    def keep(self, wide: Tensor, eight: Rows8 | None, maker: int) -> Tensor:
        self._wide, self._eight, self._maker = ref(wide), eight, maker
        self._format = self.format_of(maker)
        return wide

    def rows_for(self, packed: Linear, x: Tensor) -> Rows8 | None:
        """What was left of `x`, if it was, as `packed` wants it."""
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

    def multiplied(self, packed: Linear, out: Tensor) -> Tensor:
        self._product, self._product_of = ref(out), id(packed)
        return out

    def maker_of(self, product: Tensor) -> int:
        """The linear that gave it last; 0 where it is none's."""
        return self._product_of if self._product() is product else 0
