"""How weights become what a backend multiplies with, in parts: rounded, packed, and packed before."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .quant_formats import Kind, Quant
from .quantize_int import to_halves

__all__ = ["Kind", "Packing", "QuantizedWeight", "StoredWeights"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weights as integers: `codes_OI` int8 times `scales_OG` float16, one for each group of inputs.

    Of other kinds E4M3 times float32: `blocks`, and one scale for each output where that is the format.
    """

    quant: Quant
    codes_OI: Tensor
    scales_OG: Tensor
    given: Tensor | None = None
    """Of kind `given`: float32 [1], the scale of all activations."""
    steps_OS: Tensor | None = None
    """Of formats with steps: uint8, and the codes are step * n - zero (`quantize_int.py`)."""

    def floats(self) -> Tensor:
        """The weights that these integers stand for, [O, I] float32."""
        outputs, inputs = self.codes_OI.shape
        scales = self.scales_OG.float().repeat_interleave(self.quant.shared(inputs), dim=1)[:, :inputs]
        return self.codes_OI.float() * scales.view(outputs, inputs)

    def halves(self) -> Tensor:
        """The half bytes that weights of 4 bits are stored as, [O, I] uint8: n, without steps 8 more."""
        if self.steps_OS is None:
            return (self.codes_OI + 8).to(torch.uint8)
        return to_halves(self.codes_OI, self.steps_OS, self.quant)


class StoredWeights(Protocol):
    """What backends offer that take weights which a checkpoint holds rounded."""

    def format(self, kind: Kind) -> Quant | None:
        """None: weights of this kind are not rounded."""
        ...

    def pack_rounded(self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None) -> Any:
        """`dtype` is the model's."""
        ...


class Packing(StoredWeights, Protocol):
    """What backends offer whose packed weights may outlive the process that packed them."""

    @property
    def layout(self) -> str:
        """Names everything but format, shape and dtype that the bytes of panels depend on."""
        ...

    def pack(self, kind: Kind, weight_OI: Tensor, bias_O: Tensor | None = None) -> Any:
        """As `Ops.pack_linear`."""
        ...

    def round(self, quant: Quant, weight_OI: Tensor) -> QuantizedWeight:
        """The integers that `pack` would hold."""
        ...

    def panels(self, packed: Any) -> memoryview:
        """The packed bytes, where they are: valid as long as `packed`."""
        ...

    def attach(
        self,
        kind: Kind,
        shape: tuple[int, int],
        dtype: torch.dtype,
        panels: Tensor,
        bias_O: Tensor | None = None,
    ) -> Any | None:
        """Packed weights on `panels` made before (uint8, never written to); None if they cannot be used."""
        ...
