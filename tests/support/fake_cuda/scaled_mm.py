"""`torch._scaled_mm` as a GPU has it: what torch's own checks for CUDA let through, multiplied in float32."""

from typing import Any

import torch
from torch import Tensor


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    from torch._meta_registrations import meta_scaled_mm

    def meta(each: Any) -> Any:
        return each.to("meta") if isinstance(each, Tensor) else each

    given = (a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    told = meta_scaled_mm(*map(meta, given))
    out = (a.float() * _spread(scale_a, a.shape)) @ (b.float() * _spread(scale_b, b.shape))
    assert out.shape == told.shape
    return out.to(told.dtype)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """One for all, for each row or column, or for each 128."""
    if scales.numel() == 1:
        return scales
    for dim in (0, 1):
        if 1 < scales.shape[dim] < shape[dim]:
            scales = scales.repeat_interleave(128, dim).narrow(dim, 0, shape[dim])
    return scales
