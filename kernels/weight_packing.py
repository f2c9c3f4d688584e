"""Interfaces for weights in a backend's layout: quantized, packed, and attached from packed bytes on disk."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .quant_formats import Kind, Quant
from .quantize_int import e2m1_nibbles, to_nibbles

__all__ = ["Kind", "Packing", "QuantizedWeight", "StoredWeights"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized weights: `codes_OI` int8 times `scales_OG` float16, one scale for each group of inputs.

    FP8 kinds have E4M3 codes and float32 scales, one for each block of weights or for each output.
    """

    quant: Quant
    codes_OI: Tensor
    scales_OG: Tensor
    given: Tensor | None = None
    """Static input scale of kind `given`: float32 [1], for all activations."""
    steps_OS: Tensor | None = None
    """Step bytes of formats with steps, uint8: codes are step * n - zero (`quantize_int.py`)."""
    zeros_OG: Tensor | None = None
    """Zero points of formats with zeros, uint8: codes are n - zero."""
    order_I: Tensor | None = None
    """Input of a row, int32, that belongs to each input of the weights; None: the same. Groups are of weights
    next to each other, and act-order has put those together that share a scale."""

    def floats(self) -> Tensor:
        """Dequantize to [O, I] float32, inputs in the order of rows."""
        outputs, inputs = self.codes_OI.shape
        scales = self.scales_OG.float().repeat_interleave(self.quant.shared(inputs), dim=1)[:, :inputs]
        weights = self.codes_OI.float() * scales.view(outputs, inputs)
        return weights if self.order_I is None else weights[:, torch.argsort(self.order_I)]

    def nibbles(self) -> Tensor:
        """Return the nibbles that 4-bit weights are stored as, [O, I] uint8: n, E2M1, or without steps and
        zeros the code plus 8.
        """
        if self.quant.is_e2m1:
            return e2m1_nibbles(self.codes_OI)
        if self.zeros_OG is not None:
            zeros = self.zeros_OG.repeat_interleave(self.quant.group, dim=1)[:, : self.codes_OI.shape[1]]
            return (self.codes_OI + zeros.to(torch.int8)).to(torch.uint8)
        if self.steps_OS is None:
            return (self.codes_OI + 8).to(torch.uint8)
        return to_nibbles(self.codes_OI, self.steps_OS, self.quant)


class StoredWeights(Protocol):
    """Interface of backends that run quantized checkpoints."""

    def format(self, kind: Kind) -> Quant | None:
        """Return the format of weights of this kind; None: they stay unquantized."""
        ...

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> Any:
        """Pack a checkpoint's quantized weights. `dtype` is the model's."""
        ...


class Packing(StoredWeights, Protocol):
    """Interface of backends whose packed weights can be kept on disk and used by later processes."""

    @property
    def layout(self) -> str:
        """Name of everything but format, shape and dtype that the bytes of panels depend on."""
        ...

    def pack(self, kind: Kind, weight_OI: Tensor, bias_O: Tensor | None = None) -> Any:
        """Pack unquantized weights, see `Ops.pack_linear`."""
        ...

    def round(self, quant: Quant, weight_OI: Tensor) -> QuantizedWeight:
        """Quantize weights to the integers that `pack` would hold."""
        ...

    def panels(self, packed: Any) -> memoryview:
        """Return a view of the packed bytes, valid as long as `packed`."""
        ...

    def format_name(self, packed: Any) -> str:
        """Return the name of the format of packed weights, for `attach`; empty: unquantized."""
        ...

    def attach(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        panels: Tensor,
        bias_O: Tensor | None = None,
    ) -> Any | None:
        """Use `panels` packed before (uint8, never written to) as weights of this format; None if they cannot
        be used.
        """
        ...
