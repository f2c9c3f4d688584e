"""Packed weights of the C++ kernels, and handles of C++ objects that Python owns."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant_formats import OF_LAYERS, QUANTS, UNQUANTIZED_KINDS, Quant
from ..weight_packing import Kind, QuantizedWeight

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""dtype codes of native/library.cpp."""
ORDERED = "+order"
"""End of a format's name, for weights with an order of inputs of their own."""
KV_DTYPES = {**DTYPES, torch.int8: 2}


class PackedHandle:
    def __init__(self, pointer: int | None, free: Callable[[int], None]) -> None:
        if not pointer:
            raise MemoryError("the CPU kernels could not get the memory they asked for")
        self.pointer = pointer
        self._free = free

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self.pointer)


class CPULinear(PackedHandle):
    """Packed weights of a linear. `quant` None: unquantized. `kept` owns the memory of attached panels.
    `has_order`: inputs are gathered in an order of the weights (act-order).
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        made: int | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        quant: Quant | None,
        kept: object = None,
        *,
        has_order: bool = False,
    ) -> None:
        self.outputs, self.inputs = shape
        self.has_order = has_order
        self.dtype = dtype
        self.quant = quant
        self._kept = kept
        super().__init__(made, library.llmbox_linear_free)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs weights: `quant` for layers, its `head` for the output head and a table tied to it."""

    library: ctypes.CDLL
    layout: str
    quant: Quant | None = None

    def format(self, kind: Kind) -> Quant | None:
        if self.quant is None or kind in UNQUANTIZED_KINDS:
            return None
        if kind in OF_LAYERS:
            return self.quant
        return None if self.quant.keeps_head else self.quant.head

    def pack(self, kind: Kind, weight_OI: Tensor, bias_O: Tensor | None = None) -> CPULinear:
        outputs, inputs = weight_OI.shape
        quant, weight, bias = self.format(kind), weight_OI.contiguous(), float_bias(bias_O)
        numbers = DTYPES[weight.dtype], inputs, outputs
        if quant is None:
            made = self.library.llmbox_linear_new(*numbers, weight.data_ptr(), pointer(bias))
        else:
            made = self.library.llmbox_quant_new(
                *numbers, quant.bits, quant.group, grid_of(quant), weight.data_ptr(), pointer(bias)
            )
        return CPULinear(self.library, made, (outputs, inputs), weight.dtype, quant)

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> CPULinear:
        outputs, inputs = rounded.codes_OI.shape
        quant, bias = rounded.quant, float_bias(bias_O)
        codes_OI, scales_OG = rounded.codes_OI.contiguous(), rounded.scales_OG.contiguous()
        offsets = rounded.zeros_OG if quant.has_zeros else rounded.steps_OS
        offsets = None if offsets is None else offsets.contiguous()
        made = self.library.llmbox_quant_from(
            inputs,
            outputs,
            quant.bits,
            quant.group,
            grid_of(quant),
            codes_OI.data_ptr(),
            scales_OG.data_ptr(),
            pointer(offsets),
            pointer(rounded.order_I),
            pointer(bias),
        )
        has_order = rounded.order_I is not None
        return CPULinear(self.library, made, (outputs, inputs), dtype, quant, has_order=has_order)

    def round(self, quant: Quant, weight_OI: Tensor) -> QuantizedWeight:
        outputs, inputs = weight_OI.shape
        weight = weight_OI.contiguous()
        codes = torch.empty(outputs, inputs, dtype=torch.int8)
        scales = torch.empty(outputs, quant.groups(inputs), dtype=torch.float16)
        steps = torch.empty(outputs, quant.steps(inputs), dtype=torch.uint8) if quant.step else None
        self.library.llmbox_quantize(
            DTYPES[weight.dtype],
            inputs,
            outputs,
            quant.bits,
            quant.group,
            weight.data_ptr(),
            codes.data_ptr(),
            scales.data_ptr(),
            pointer(steps),
        )
        return QuantizedWeight(quant, codes, scales, steps_OS=steps)

    def panels(self, packed: CPULinear) -> memoryview:
        size = self.library.llmbox_packed_bytes(packed.pointer)
        address = self.library.llmbox_packed(packed.pointer)
        return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")

    def format_name(self, packed: CPULinear) -> str:
        if packed.quant is None:
            return ""
        return packed.quant.name + (ORDERED if packed.has_order else "")

    def attach(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        panels: Tensor,
        bias_O: Tensor | None = None,
    ) -> CPULinear | None:
        (outputs, inputs), bias = shape, float_bias(bias_O)
        quant, has_order = QUANTS.get(name.removesuffix(ORDERED)), name.endswith(ORDERED)
        at = panels.data_ptr()
        if at % 64:
            return None
        if quant is None:
            made = self.library.llmbox_linear_at(DTYPES[dtype], inputs, outputs, at, pointer(bias))
        else:
            made = self.library.llmbox_quant_at(
                inputs, outputs, quant.bits, quant.group, grid_of(quant), has_order, at, pointer(bias)
            )
        linear = CPULinear(self.library, made, shape, dtype, quant, panels, has_order=has_order)
        return linear if self.library.llmbox_packed_bytes(linear.pointer) == panels.nbytes else None


def grid_of(quant: Quant) -> int:
    """Return the code of Grid4 of native/quantized/quantize_weights.h."""
    return 3 if quant.step else 2 if quant.is_e2m1 else 1 if quant.has_zeros else 0


def float_bias(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.float().contiguous()


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pointers(linears: Sequence[CPULinear]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(linears))(*(linear.pointer for linear in linears))
