"""Weights in a backend's layout: quantization to integers of 4 and 8 bits in plain torch, and the interfaces
of weights that are packed, or attached from packed bytes on disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .quant_formats import BLOCK_TABLES, Kind, Quant

TRIED = range(-5, 6)
"""Candidate scales: the largest weight is placed at -8 - 0.2 * each."""


def int8_scale(x: Tensor) -> Tensor:
    """Return the scale of each group, [..., group] -> [...]: the largest weight becomes 127."""
    return x.abs().amax(-1) / 127


def best_int4_scale(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """Search the int4 scale of each group, [..., group] -> [...].

    Eleven scales around the one that places the largest weight at the end of the range are tried, each with
    its least-squares correction. The one of least error wins. Errors are weighted by |x| + the group's root
    mean square, and by the importance of the input where it is known.
    """
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best, best_gain = extreme / -8, torch.zeros_like(extreme)
    counts = x.abs() + x.square().mean(-1, keepdim=True).sqrt()
    if importance is not None:
        counts = counts * importance
    for step in TRIED:
        inverse = torch.where(extreme == 0, 0, -(8 + 0.2 * step) / extreme).unsqueeze(-1)
        code = (x * inverse).round_().clamp_(-8, 7)
        cross, square = (counts * x * code).sum(-1), (counts * code * code).sum(-1)
        gain = torch.where(square > 0, cross * cross / square, 0)
        better = gain > best_gain
        best = torch.where(better, cross / square, best)
        best_gain = torch.where(better, gain, best_gain)
    return best


E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of E2M1, the 4-bit float of MXFP4, times two."""


def e2m1_nibbles(numbers: Tensor) -> Tensor:
    """Return the four bits of doubled E2M1 values, uint8 of the same shape."""
    sizes = torch.tensor(E2M1_DOUBLED[:8], dtype=torch.int8, device=numbers.device)
    places = torch.searchsorted(sizes, numbers.abs().contiguous()).to(torch.uint8)
    return places | (numbers < 0).to(torch.uint8) << 3


STEP_INPUTS = 16
PLAIN = 0x81
"""Step byte of formats without steps: step 1, zero point 8."""
SHARES = (0.84, 0.94, 1.04)
"""Candidate scales, as shares of the one at which the coarsest step is 12."""
NEAR = [(times, zeros) for times in (-1, 0, 1) for zeros in (-2, -1, 0, 1, 2)]
"""Candidate offsets (step, zero) around the pair that just spans 16 weights."""


def step_and_zero(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack step bytes to steps and zero points, int32 of the same shape."""
    wide = steps.int()
    step = wide & 15
    return step, step * ((wide >> 4) + 8) >> 1


def to_numbers(halves_OI: Tensor, steps_OS: Tensor, quant: Quant) -> Tensor:
    """Dequantize nibbles n [O, I] to int8. Input is not validated: numbers that do not fit wrap around."""
    step, zero = expand_steps(steps_OS, quant, halves_OI.shape[1])
    return (step * halves_OI.int() - zero).to(torch.int8)


def to_nibbles(numbers_OI: Tensor, steps_OS: Tensor, quant: Quant) -> Tensor:
    """Invert `to_numbers`: return the nibbles n, uint8."""
    step, zero = expand_steps(steps_OS, quant, numbers_OI.shape[1])
    return ((numbers_OI.int() + zero) // step.clamp(min=1)).to(torch.uint8) & 15


def expand_steps(steps_OS: Tensor, quant: Quant, inputs: int) -> tuple[Tensor, Tensor]:
    """Return step and zero point of each weight, [O, I] int32."""
    step, zero = step_and_zero(steps_OS.repeat_interleave(quant.step, 1)[:, :inputs])
    return step, zero


def round_with_steps(
    x_OGg: Tensor, quant: Quant, importance_Gg: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 groups to int8 numbers [O, G, g], float16 scales [O, G] and uint8 steps [O, G, S].

    An error is weighted by |x| + the root mean square of its 16 inputs, times the importance of its input.
    """
    x_OGSk = x_OGg.view(*x_OGg.shape[:2], -1, quant.step)
    low, high = x_OGSk.aminmax(dim=-1)
    middle_OGS = (low + high) / 2
    counts = x_OGSk.abs() + x_OGSk.square().mean(-1, keepdim=True).sqrt()
    if importance_Gg is not None:
        counts = counts * importance_Gg.view(x_OGSk.shape[1:])
    need_OGS = torch.stack(((high - low) / 15, high / 11, low / -11.5)).amax(0)
    widest = torch.maximum(high, -low).amax(-1) * (12 / 127)
    coarsest_OG = torch.maximum(need_OGS.amax(-1), widest)
    best = BestScale(x_OGSk)
    for share in SHARES:
        scale_OG = coarsest_OG * (share / 12)
        inverse = torch.where(scale_OG == 0, 0, 1 / scale_OG)[:, :, None]
        tried = x_OGSk * inverse[..., None]
        steps, numbers = best_steps(tried, counts, need_OGS * inverse, middle_OGS * inverse)
        best.offer(steps, numbers, (counts * numbers * tried).sum((-1, -2)), counts, scale_OG)
    return best.numbers.flatten(-2).to(torch.int8), best.scale_OG.half(), best.steps_OGS


class BestScale:
    """Keep the best of several scales, each corrected by least squares: it explains most of the weighted
    squares.
    """

    def __init__(self, x_OGSk: Tensor) -> None:
        self.numbers = torch.zeros_like(x_OGSk)
        self.steps_OGS = torch.full(x_OGSk.shape[:3], PLAIN, dtype=torch.uint8, device=x_OGSk.device)
        self.scale_OG = torch.zeros(x_OGSk.shape[:2], device=x_OGSk.device)
        self._explained_OG = torch.zeros_like(self.scale_OG)

    def offer(
        self, steps: Tensor, numbers: Tensor, cross_OG: Tensor, counts: Tensor, scale_OG: Tensor
    ) -> None:
        square_OG = (counts * numbers * numbers).sum((-1, -2))
        fitted_OG = torch.where(square_OG > 0, scale_OG * cross_OG / square_OG, 0)
        explained_OG = fitted_OG * scale_OG * cross_OG
        better = explained_OG > self._explained_OG
        self._explained_OG = torch.where(better, explained_OG, self._explained_OG)
        self.scale_OG = torch.where(better, fitted_OG, self.scale_OG)
        self.steps_OGS = torch.where(better[..., None], steps, self.steps_OGS)
        self.numbers = torch.where(better[..., None, None], numbers, self.numbers)


def best_steps(x_OGSk: Tensor, counts: Tensor, need_OGS: Tensor, middle_OGS: Tensor) -> tuple[Tensor, Tensor]:
    """Return the steps [O, G, S] uint8 and numbers of least weighted error. x is in units of the scale."""
    smallest = torch.full_like(need_OGS, torch.inf)
    steps, best = torch.full_like(need_OGS, PLAIN, dtype=torch.uint8), torch.zeros_like(x_OGSk)
    for times, zeros in NEAR:
        step = (need_OGS.round() + times).clamp(1, 15)
        z = ((7 - 2 * middle_OGS / step).round() + zeros).clamp(0, 15)
        zero = (step * (z + 8) / 2).floor()
        numbers = round_to_grid(x_OGSk, step[..., None], zero[..., None])
        error = (counts * (numbers - x_OGSk).square()).sum(-1)
        better = error < smallest
        smallest = torch.where(better, error, smallest)
        steps = torch.where(better, step.to(torch.uint8) | z.to(torch.uint8) << 4, steps)
        best = torch.where(better[..., None], numbers, best)
    return steps, best


def round_to_grid(x: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    """Round x to the nearest step * n - zero, with n in 0..15, that fits int8."""
    lowest = ((zero - 128) / step).ceil().clamp(min=0)
    highest = ((zero + 127) / step).floor().clamp(max=15)
    n = torch.minimum(torch.maximum(((x + zero) / step).round(), lowest), highest)
    return step * n - zero


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
    """Step bytes of formats with steps, uint8: codes are step * n - zero."""
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

    def pack_wide(self, rounded: QuantizedWeight, dtype: torch.dtype) -> Any | None:
        """Pack weights that stay integers in memory and are multiplied as float32, for `Ops.linear_by_head`;
        None for formats that cannot.
        """
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
