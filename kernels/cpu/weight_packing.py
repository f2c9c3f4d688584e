"""Packed weights of the C++ kernels, and handles of C++ objects that Python owns."""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..quant_formats import KERNEL_QUANTS, OF_LAYERS, QUANTS, UNQUANTIZED_KINDS, BlockGrid, Quant
from ..weight_packing import BlockWeight, Kind, QuantizedWeight

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""dtype codes of native/dtypes.h."""
INT8_SCALED, WIDE_BFLOAT16 = 2, 3
"""Codes there of weights that become float32 as they are read."""
ORDERED = "+order"
"""End of a format's name, for weights with an order of inputs of their own."""
WIDE = "float32 "
"""Begin of the name of a format whose weights become float32 as they are read, and are not multiplied as bf16
or integers. The format's own name follows, empty for bfloat16."""
STACKED, TIMES = "+", "*"
"""In the name of a stack's format: between its parts, and between format, outputs and bytes of a part."""
WIDE_QUANT = QUANTS["int8-g32"]
"""The integers that weights may become float32 from: those of Q8_0."""
BLOCK_GRIDS: dict[BlockGrid, int] = {
    "centered": 4, "table": 5, "minimums": 6, "k_minimums": 7, "k_pairs": 8, "k_signed": 9, "k_table": 10,
    "k_iq1": 11, "k_iq2": 12, "k_iq3_xxs": 13, "k_iq3_s": 14,
}  # fmt: skip
"""Codes of Grid4 of native/quantized/quantize_weights.h."""
KV_DTYPES = {**DTYPES, torch.int8: 2}


class PackedHandle:
    """C++ object. It stands for its address among the arguments of a function."""

    def __init__(self, pointer: int | None, free: Callable[[int], None]) -> None:
        if not pointer:
            raise MemoryError("the CPU kernels could not get the memory they asked for")
        self.pointer = self._as_parameter_ = pointer
        self._free = free

    def __del__(self) -> None:
        if hasattr(self, "_free"):
            self._free(self.pointer)


class CPULinear(PackedHandle):
    """Packed weights of a linear. `quant` None: unquantized. `kept` owns the memory of attached panels.
    `has_order`: inputs are gathered in an order of the weights (act-order). `is_wide`: weights become
    float32 as they are read, and so do rows.
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
        is_wide: bool = False,
    ) -> None:
        self.outputs, self.inputs = shape
        self.has_order = has_order
        self.is_wide = is_wide
        self.dtype = dtype
        self.quant = quant
        self._kept = kept
        super().__init__(made, library.llmbox_linear_free)

    @property
    def form(self) -> int:
        """Code of what the weights are multiplied as, for `llmbox_linear_by_head_op`."""
        if not self.is_wide:
            return DTYPES[self.dtype]
        return WIDE_BFLOAT16 if self.quant is None else INT8_SCALED

    @property
    def parts(self) -> "tuple[CPULinear, ...]":
        return (self,)

    def unprotect(self) -> None:
        """Let panels that were attached be written. They lie in a private mapping of a file: it is unchanged.
        Raises OSError.
        """
        if not isinstance(self._kept, Tensor):
            return
        whole = self._kept.untyped_storage()
        begin = whole.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = whole.data_ptr() + whole.nbytes() - begin
        libc = ctypes.CDLL(None, use_errno=True)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), access):
            raise OSError(ctypes.get_errno(), "packed weights cannot be made writable")


@dataclass(frozen=True, slots=True)
class CPULinearStack:
    """Linear whose outputs have several formats: parts of consecutive outputs, computed one after another."""

    parts: tuple[CPULinear, ...]

    @property
    def outputs(self) -> int:
        return sum(part.outputs for part in self.parts)

    @property
    def inputs(self) -> int:
        return self.parts[0].inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype


CPUWeights = CPULinear | CPULinearStack


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs weights: `quant` for layers, its `head` for the output head and a table tied to it."""

    library: ctypes.CDLL
    layout: str
    quant: Quant | None = None

    @property
    def holds_blocks(self) -> bool:
        return self.quant is not None and self.quant.is_gguf

    def format(self, kind: Kind) -> Quant | None:
        if self.quant is None or kind in UNQUANTIZED_KINDS or self.quant.is_gguf:
            return None
        if kind in OF_LAYERS:
            return self.quant
        return None if self.quant.keeps_head else self.quant.head

    def pack(self, kind: Kind, weight_OI: Tensor, bias_O: Tensor | None = None) -> CPULinear:
        outputs, inputs = weight_OI.shape
        quant, dtype, bias = self.format(kind), weight_OI.dtype, float_bias(bias_O)
        # Beside integer weights, so that a model has the same bits on all instruction sets.
        is_wide = kind == "router" and self.quant is not None and dtype == torch.bfloat16
        weight = weight_OI.contiguous()
        numbers = WIDE_BFLOAT16 if is_wide else DTYPES[dtype], inputs, outputs
        if quant is None:
            made = self.library.llmbox_linear_new(*numbers, weight, bias)
        else:
            made = self.library.llmbox_quant_new(
                *numbers, quant.bits, quant.group, grid_of(quant), weight, bias
            )
        return CPULinear(self.library, made, (outputs, inputs), dtype, quant, is_wide=is_wide)

    def pack_wide(self, rounded: QuantizedWeight, dtype: torch.dtype) -> CPULinear | None:
        return self._pack_rounded(rounded, dtype, is_wide=True) if rounded.quant == WIDE_QUANT else None

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> CPULinear:
        return self._pack_rounded(rounded, dtype, bias_O)

    def _pack_rounded(
        self,
        rounded: QuantizedWeight,
        dtype: torch.dtype,
        bias_O: Tensor | None = None,
        *,
        is_wide: bool = False,
    ) -> CPULinear:
        outputs, inputs = rounded.codes_OI.shape
        quant, bias = rounded.quant, float_bias(bias_O)
        codes_OI, scales_OG = rounded.codes_OI.contiguous(), rounded.scales_OG.contiguous()
        offsets = rounded.zeros_OG if quant.has_zeros else rounded.steps_OS
        offsets = None if offsets is None else offsets.contiguous()
        form = inputs, outputs, quant.bits, quant.group, grid_of(quant)
        made = self.library.llmbox_quant_from(*form, codes_OI, scales_OG, offsets, rounded.order_I, bias)
        has_order = rounded.order_I is not None
        shape = outputs, inputs
        return CPULinear(self.library, made, shape, dtype, quant, has_order=has_order, is_wide=is_wide)

    def pack_blocks(
        self,
        parts: Sequence[QuantizedWeight | BlockWeight | Tensor],
        dtype: torch.dtype,
        bias_O: Tensor | None = None,
    ) -> CPUWeights:
        packed, row = [], 0
        for part in parts:
            outputs = len(part if isinstance(part, Tensor) else _numbers(part))
            bias = None if bias_O is None else bias_O[row : row + outputs]
            row += outputs
            if isinstance(part, BlockWeight):
                packed.append(self._pack_block_weight(part, dtype, bias))
            elif isinstance(part, QuantizedWeight):
                packed.append(self.pack_quantized(part, dtype, bias))
            else:
                packed.append(self.pack("router", part.to(dtype), bias))
        return packed[0] if len(packed) == 1 else CPULinearStack(tuple(packed))

    def _pack_block_weight(self, weight: BlockWeight, dtype: torch.dtype, bias_O: Tensor | None) -> CPULinear:
        outputs, inputs = weight.numbers_OI.shape
        bias = float_bias(bias_O)
        tensors = (
            weight.numbers_OI,
            weight.scales_OU,
            weight.minimums_OU,
            weight.scale_parts_OP,
            weight.minimum_parts_OP,
        )
        kept = [None if each is None else each.contiguous() for each in tensors]
        made = self.library.llmbox_quant_blocks(
            inputs, outputs, weight.quant.bits, grid_of(weight.quant), *kept, bias
        )
        return CPULinear(self.library, made, (outputs, inputs), dtype, weight.quant)

    def round(self, quant: Quant, weight_OI: Tensor) -> QuantizedWeight:
        outputs, inputs = weight_OI.shape
        weight = weight_OI.contiguous()
        codes = torch.empty(outputs, inputs, dtype=torch.int8)
        scales = torch.empty(outputs, quant.groups(inputs), dtype=torch.float16)
        steps = torch.empty(outputs, quant.steps(inputs), dtype=torch.uint8) if quant.step else None
        form = DTYPES[weight.dtype], inputs, outputs, quant.bits, quant.group
        self.library.llmbox_quantize(*form, weight, codes, scales, steps)
        return QuantizedWeight(quant, codes, scales, steps_OS=steps)

    def panels(self, packed: CPUWeights) -> memoryview:
        if isinstance(packed, CPULinearStack):
            return memoryview(b"".join(map(self.panels, packed.parts)))
        size = self.library.llmbox_packed_bytes(packed.pointer)
        address = self.library.llmbox_packed(packed.pointer)
        return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")

    def memory(self, packed: CPUWeights) -> list[Tensor]:
        """Return panels and bias of each part as tensors that may be written (`Ops.weight_memory`)."""
        found = []
        for part in packed.parts:
            part.unprotect()
            found.append(_view(self.panels(part)))
            size = ctypes.c_int64()
            address = self.library.llmbox_bias(part.pointer, ctypes.byref(size))
            if size.value:
                found.append(_view((ctypes.c_float * size.value).from_address(address)))
        return found

    def format_name(self, packed: CPUWeights) -> str:
        if isinstance(packed, CPULinearStack):
            sizes = [self.library.llmbox_packed_bytes(part.pointer) for part in packed.parts]
            return STACKED.join(
                TIMES.join((self.format_name(part), str(part.outputs), str(size)))
                for part, size in zip(packed.parts, sizes, strict=True)
            )
        begin, end = WIDE if packed.is_wide else "", ORDERED if packed.has_order else ""
        return begin + ("" if packed.quant is None else packed.quant.name) + end

    def attach(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        panels: Tensor,
        bias_O: Tensor | None = None,
    ) -> CPUWeights | None:
        if TIMES in name:
            return self._attach_stack(name, shape, dtype, panels, bias_O)
        (outputs, inputs), bias = shape, float_bias(bias_O)
        is_wide, has_order = name.startswith(WIDE), name.endswith(ORDERED)
        quant = KERNEL_QUANTS.get(name.removeprefix(WIDE).removesuffix(ORDERED))
        if panels.data_ptr() % 64:
            return None
        if quant is None:
            kept_as = WIDE_BFLOAT16 if is_wide else DTYPES[dtype]
            made = self.library.llmbox_linear_at(kept_as, inputs, outputs, panels, bias)
        else:
            made = self.library.llmbox_quant_at(
                inputs, outputs, quant.bits, quant.group, grid_of(quant), has_order, panels, bias
            )
        linear = CPULinear(
            self.library, made, shape, dtype, quant, panels, has_order=has_order, is_wide=is_wide
        )
        return linear if self.library.llmbox_packed_bytes(linear.pointer) == panels.nbytes else None

    def _attach_stack(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype, panels: Tensor, bias_O: Tensor | None
    ) -> CPULinearStack | None:
        parts: list[CPULinear] = []
        row = start = 0
        for each in name.split(STACKED):
            form, outputs, size = each.split(TIMES)[0], *map(int, each.split(TIMES)[1:])
            bias = None if bias_O is None else bias_O[row : row + outputs]
            part = self.attach(form, (outputs, shape[1]), dtype, panels[start : start + size], bias)
            if not isinstance(part, CPULinear):
                return None
            parts.append(part)
            row, start = row + outputs, start + size
        return CPULinearStack(tuple(parts)) if (row, start) == (shape[0], panels.nbytes) else None


def _view(memory: Any) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _numbers(weight: QuantizedWeight | BlockWeight) -> Tensor:
    return weight.numbers_OI if isinstance(weight, BlockWeight) else weight.codes_OI


def grid_of(quant: Quant) -> int:
    """Return the code of Grid4 of native/quantized/quantize_weights.h."""
    if quant.grid:
        return BLOCK_GRIDS[quant.grid]
    return 3 if quant.step else 2 if quant.is_e2m1 else 1 if quant.has_zeros else 0


def float_bias(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.float().contiguous()


def pointers(linears: Sequence[CPULinear]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(linears))(*(linear.pointer for linear in linears))
