"""Linears at load: packing of weights into their layouts, with quantization, and the selection of FP8 linears
that use `torch._scaled_mm`, where it runs on this GPU and is correct. Plain torch: it runs once.

No list says what a version of PyTorch offers on a GPU: cuBLAS refuses what it has no kernel for. The first
linear of each shape is therefore multiplied at load, with few and with many rows, and compared; all linears
of that shape then take the same path. Another path has other sums, so the choice never changes later.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quant_formats import Quant
from ...weight_packing import QuantizedWeight, best_int4_scale, int8_scale, round_with_steps, to_nibbles
from .gemm import Grouped
from .gemm_w8a8 import BLOCK, Sharing, fits_scaled_mm
from .linear import Fp8BlockLinear, Fp8Linear, Linear, multiply
from .quantize_activations import LARGEST, quantize_rows

ROWS_AT_ONCE = 1024
"""Outputs quantized at once: bounds the memory that packing takes beside the weights."""


def pack_grouped(weight_OI: Tensor, quant: Quant) -> Grouped:
    outputs, inputs = weight_OI.shape
    groups, width = quant.groups(inputs), quant.group * quant.bits // 8
    empty = weight_OI.new_empty
    weight = empty((groups, outputs, width), dtype=torch.int8 if quant.bits == 8 else torch.uint8)
    scales = empty((groups, outputs), dtype=torch.float16)
    steps_GOS = empty((groups, outputs, quant.group // quant.step), dtype=torch.uint8) if quant.step else None
    for first in range(0, outputs, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = F.pad(weight_OI[rows].float(), (0, groups * quant.group - inputs))
        x_OGg = part.view(-1, groups, quant.group)
        if steps_GOS is None:
            scale_OG = (int8_scale(x_OGg) if quant.bits == 8 else best_int4_scale(x_OGg)).half()
            stored = pair(round_to(x_OGg, scale_OG.float(), quant.bits), quant.bits)
        else:
            numbers_OGg, scale_OG, steps_OGS = round_with_steps(x_OGg, quant)
            halves = to_nibbles(numbers_OGg.flatten(1), steps_OGS.flatten(1), quant)
            stored = pack_nibbles(halves.view(x_OGg.shape))
            steps_GOS[:, rows] = steps_OGS.transpose(0, 1)
        scales[:, rows] = scale_OG.T
        weight[:, rows] = stored.transpose(0, 1)
    return Grouped(weight, scales, quant.bits, inputs, steps_GOS)


def round_to(x_OGg: Tensor, scale_OG: Tensor, bits: int) -> Tensor:
    inverse = torch.where(scale_OG == 0, 0, 1 / scale_OG).unsqueeze(-1)
    most = 1 << (bits - 1)
    return (x_OGg * inverse).round_().clamp_(-most, most - 1).to(torch.int8)


def pair(codes_OGg: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes_OGg
    return pack_nibbles((codes_OGg + 8).to(torch.uint8))


def pack_nibbles(halves_OGg: Tensor) -> Tensor:
    low, high = halves_OGg.chunk(2, -1)
    return low | high << 4


def group_codes(rounded: QuantizedWeight) -> Grouped:
    """Pack the integers that a checkpoint holds."""
    quant = rounded.quant
    codes_OI = rounded.codes_OI if quant.bits == 8 else rounded.nibbles()
    outputs, inputs = codes_OI.shape
    groups = quant.groups(inputs)
    fill = 8 if quant.bits == 4 and not (quant.step or quant.has_zeros or quant.is_e2m1) else 0
    codes_OGg = F.pad(codes_OI, (0, groups * quant.group - inputs), value=fill).view(outputs, groups, -1)
    weight_OGw = codes_OGg if quant.bits == 8 else pack_nibbles(codes_OGg)
    steps_GOS = None
    if rounded.steps_OS is not None:
        steps_GOS = rounded.steps_OS.view(outputs, groups, -1).transpose(0, 1).contiguous()
    scales_GO = rounded.scales_OG.T.contiguous()
    zeros_GO = None if rounded.zeros_OG is None else rounded.zeros_OG.T.contiguous()
    weight = weight_OGw.transpose(0, 1).contiguous()
    return Grouped(weight, scales_GO, quant.bits, inputs, steps_GOS, zeros_GO, quant.is_e2m1)


def pack_fp8(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3 numbers [O, I] with scales [O, 1]."""
    numbers = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scales = torch.empty((len(weight_OI), 1), dtype=torch.float32, device=weight_OI.device)
    for first in range(0, len(weight_OI), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = weight_OI[rows].float()
        most = part.abs().amax(1, keepdim=True)
        numbers[rows] = (part * inverse_of(most)).to(torch.float8_e4m3fn)
        scales[rows] = most / LARGEST[torch.float8_e4m3fn]
    return numbers, scales


def pack_fp8_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to E4M3 numbers [O, I] with block scales [O / BLOCK, I / BLOCK]."""
    outputs, inputs = weight_OI.shape
    down, across = -(-outputs // BLOCK), -(-inputs // BLOCK)
    numbers = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scales = torch.empty((down, across), dtype=torch.float32, device=weight_OI.device)
    for n in range(down):
        rows = slice(n * BLOCK, (n + 1) * BLOCK)
        part = weight_OI[rows].float()
        most_I = F.pad(part.abs().amax(0), (0, across * BLOCK - inputs))
        most = most_I.view(across, BLOCK).amax(1)
        inverse_I = inverse_of(most).repeat_interleave(BLOCK)[:inputs]
        numbers[rows] = (part * inverse_I).to(torch.float8_e4m3fn)
        scales[n] = most / LARGEST[torch.float8_e4m3fn]
    return numbers, scales


def inverse_of(most: Tensor) -> Tensor:
    """Return the inverse of the E4M3 scale for this largest magnitude."""
    inverse = torch.full_like(most, LARGEST[torch.float8_e4m3fn]) / most
    return torch.where(inverse.isfinite(), inverse, 0)  # infinite for zeros and tiny maxima


def scales_of_blocks(scales_OG: Tensor) -> Tensor:
    """Return scales [O / BLOCK, G] where BLOCK outputs share one; unchanged where merged matrices do not
    share them.
    """
    first = scales_OG[::BLOCK]
    spread = first.repeat_interleave(BLOCK, 0)[: len(scales_OG)]
    return first.contiguous() if torch.equal(spread, scales_OG) else scales_OG.contiguous()


log = logging.getLogger("llmbox.engine")

ROWS = (1, 3, 17, 64, 130, 600)
COMPARED = 256
"""Compared outputs: enough to see that scales are applied in the right places."""
NEAR = 0.02
"""Largest accepted error ||torch - exact|| / ||exact|| over the same 8-bit numbers."""

Probe = Callable[[Linear, torch.dtype], str | None]
"""(linear, model's dtype) -> reason why `torch._scaled_mm` cannot multiply it, or None."""


class ScaledMMSelector:
    """Selector for the linears of one model."""

    def __init__(self, dtype: torch.dtype, probe: Probe | None = None) -> None:
        self._dtype = dtype
        self._probe = probe if probe is not None else why_not
        self._found: dict[tuple[Sharing, torch.Size], bool] = {}

    def of(self, packed: Linear) -> Linear:
        """Return the linear, marked for `torch._scaled_mm` where that works."""
        sharing = sharing_of(packed)
        if sharing is None or not isinstance(packed, Fp8Linear | Fp8BlockLinear):
            return packed
        by_torch = replace(packed, by_torch=sharing)
        key = sharing, packed.weight_OI.shape
        if key not in self._found:
            reason = self._probe(by_torch, self._dtype)
            self._found[key] = reason is None
            if reason is not None:
                log.info("fp8 linears of %s x %s run in Triton: %s", *key[1], reason)
        return by_torch if self._found[key] else packed


def sharing_of(packed: Linear) -> Sharing | None:
    """Return the scale layout of a linear for `torch._scaled_mm`; None if there is none."""
    sharing: Sharing
    match packed:
        case Fp8Linear(weight_OI, _, _, given, one_1):
            sharing = "rows" if given is None or one_1 is None else "tensor"
        case Fp8BlockLinear(weight_OI, scales, _) if len(scales) < len(weight_OI):
            sharing = "blocks"
        case _:
            return None
    return sharing if fits_scaled_mm(sharing, *weight_OI.shape) else None


def why_not(packed: Linear, dtype: torch.dtype) -> str | None:
    """Probe a linear by multiplying with it, see `Probe`."""
    assert isinstance(packed, Fp8Linear | Fp8BlockLinear)
    if not is_on_gpu(packed.weight_OI):
        return "not on a GPU"
    if dtype.itemsize != 2:
        return f"results in {str(dtype).removeprefix('torch.')} want sums in float32"
    try:
        worst = max(error_of(packed, count, dtype) for count in ROWS)
    except (RuntimeError, ValueError) as error:  # NotImplementedError and torch's own are RuntimeErrors
        lines = str(error).strip().splitlines() or [""]
        return f"torch._scaled_mm: {type(error).__name__}: {lines[0][:200]}"
    return None if worst <= NEAR else f"torch._scaled_mm is off by {worst:.1%}"


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def error_of(packed: Fp8Linear | Fp8BlockLinear, count: int, dtype: torch.dtype) -> float:
    """Return the error over `count` random rows; infinity if a result is not finite.

    Magnitudes grow from row to row and along the inputs, so that a scale in a wrong place is noticed.
    """
    device, inputs = packed.weight_OI.device, packed.weight_OI.shape[1]
    generator = torch.Generator(device).manual_seed(count)
    x_TI = torch.randn((count, inputs), device=device, generator=generator)
    x_TI *= torch.linspace(0.1, 1, inputs, device=device)
    x_TI = (x_TI * torch.linspace(0.5, 1.5, count, device=device)[:, None]).to(dtype)
    if isinstance(packed, Fp8Linear) and packed.given is not None:
        x_TI = (x_TI * packed.given * 50).to(dtype)  # most of the numbers that the scale leaves room for
    rows = quantize_rows(x_TI, packed.row_format)
    wide_TI = rows.numbers.float() * spread(rows.scales, x_TI.shape)
    weight_OI = packed.weight_OI[:COMPARED].float()
    shared = 128 if isinstance(packed, Fp8BlockLinear) else 1
    wide_OI = weight_OI * spread(packed.scales[: len(weight_OI) // shared], weight_OI.shape)
    exact = (wide_TI @ wide_OI.T).double()
    got = multiply(replace(packed, bias_O=None), x_TI, rows, fixed=False)[:, :COMPARED].double()
    error = float((got - exact).norm() / exact.norm())
    return min(float("inf"), error)  # in this order: NaN is not less


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Expand scales to [rows, inputs]. They are shared by 128 inputs and 1 or 128 rows, or by all inputs of a
    row.
    """
    if scales.shape[1] > 1:
        scales = scales.repeat_interleave(128, 1)[:, : shape[1]]
    return scales if len(scales) >= shape[0] else scales.repeat_interleave(128, 0)[: shape[0]]
