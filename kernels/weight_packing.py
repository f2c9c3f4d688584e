"""Interfaces for weights in a backend's layout: quantized, packed, and attached from packed bytes on disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .quant_formats import BLOCK_TABLES, Kind, Quant
from .quantize_int import e2m1_nibbles, to_nibbles

__all__ = ["BlockWeight", "Kind", "Packing", "QuantizedWeight", "StoredWeights", "scale_dtype"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Quantized weights: `codes_OI` int8 times `scales_OG`, of `scale_dtype`, one scale for each group of
    inputs.

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


def scale_dtype(quant: Quant) -> torch.dtype:
    """Return the dtype of integer formats' scales: float16, or bfloat16, which holds all powers of two of
    MXFP4.
    """
    return torch.bfloat16 if quant.is_e2m1 else torch.float16


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Weights of GGUF's blocks, as `BlockGrid` says: O outputs, I inputs, U units, P parts of units."""

    quant: Quant
    numbers_OI: Tensor
    """uint8."""
    scales_OU: Tensor
    """float16."""
    minimums_OU: Tensor | None = None
    """float16."""
    scale_parts_OP: Tensor | None = None
    """uint8; bits of signed bytes where the grid has those."""
    minimum_parts_OP: Tensor | None = None
    """uint8."""

    def floats(self) -> Tensor:
        """Dequantize to [O, I] float32, with the products and the order of ggml."""
        quant = self.quant
        scales_OS, minimums_OS = self.scales_OU.float(), None
        if self.minimums_OU is not None:
            minimums_OS = self.minimums_OU.float()
        span = quant.unit
        if self.scale_parts_OP is not None:
            span, parts_OP = quant.span, self.scale_parts_OP
            leasts_OP = self.minimum_parts_OP
            if quant.grid == "k_pairs":
                parts_OP, leasts_OP = parts_OP & 15, parts_OP >> 4
            elif leasts_OP is None:
                parts_OP = parts_OP.view(torch.int8)
            each = quant.unit // span
            scales_OS = scales_OS.repeat_interleave(each, 1) * parts_OP
            if minimums_OS is not None and leasts_OP is not None:
                minimums_OS = -(minimums_OS.repeat_interleave(each, 1) * leasts_OP)
        numbers = self.numbers_OI.float()
        if quant.grid in BLOCK_TABLES:
            values, factor = BLOCK_TABLES[quant.grid]
            numbers = (torch.tensor(values) * factor)[self.numbers_OI.int()]
        elif minimums_OS is None:
            numbers = numbers - quant.zero
        outputs, inputs = numbers.shape
        weights = scales_OS.unsqueeze(-1) * numbers.view(outputs, -1, span)
        if minimums_OS is not None:
            weights = weights + minimums_OS.unsqueeze(-1)
        return weights.view(outputs, inputs)


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

    @property
    def holds_blocks(self) -> bool:
        """True if weights of a GGUF file keep their blocks."""
        ...

    def pack_blocks(
        self,
        parts: Sequence[QuantizedWeight | BlockWeight | Tensor],
        dtype: torch.dtype,
        bias_O: Tensor | None = None,
    ) -> Any:
        """Pack outputs of several formats as one linear; a tensor has unquantized ones."""
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
