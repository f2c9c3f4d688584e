"""Selection of FP8 linears that use `torch._scaled_mm`: those where it runs on this GPU and is correct.

No list says what a version of PyTorch offers on a GPU: cuBLAS refuses what it has no kernel for. The first
linear of each shape is therefore multiplied at load, with few and with many rows, and compared; all linears
of that shape then take the same path. Another path has other sums, so the choice never changes later.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .gemm_w8a8 import Sharing, fits_scaled_mm
from .linear import Fp8BlockLinear, Fp8Linear, Linear, multiply
from .quantize_activations import quantize_rows

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
