"""Largest logit of each chunk of a row. Sampling begins with these and skips chunks below its thresholds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


def chunk_maxima(logits_RV: Tensor) -> Tensor:
    """Return the largest logit of each chunk, [R, chunks] float32; NaN where a chunk has one. Columns must be
    contiguous.
    """
    rows, vocabulary = logits_RV.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    maxima_RC = torch.empty((rows, chunks), dtype=torch.float32, device=logits_RV.device)
    maxima_kernel[(rows, chunks)](maxima_RC, logits_RV, logits_RV.stride(0), vocabulary, CHUNK=CHUNK)
    return maxima_RC


@triton.jit
def maxima_kernel(
    maxima: tl.tensor, logits: tl.tensor, row_stride: tl.tensor, vocabulary: tl.tensor, CHUNK: tl.constexpr
) -> None:
    """Write the largest logit of one chunk, float32: max(x), or NaN if any x is NaN."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0)  # noqa: PLR0124 - a maximum would pass over NaN
    most = tl.where(broken > 0, float("nan"), tl.max(x, 0))
    tl.store(maxima + row * tl.num_programs(1) + chunk, most)


@triton.jit
def best_of_chunks(most: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """Return the largest of a row's chunk maxima, and 1 if one is NaN, which a maximum would ignore."""
    c = tl.arange(0, CHUNKS)
    tops = tl.load(most + c, mask=c < chunks, other=float("-inf"))
    return tl.max(tops, 0), tl.max((tops != tops).to(tl.int32), 0)  # noqa: PLR0124


@triton.jit
def canonicalize_best(best: tl.tensor, broken: tl.tensor) -> tl.tensor:
    """Return the row's largest logit: NaN for a broken row, and 0.0 for both zeros."""
    return tl.where(broken > 0, float("nan"), tl.where(best == 0.0, 0.0, best))


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Map float32 to int32 keys of the same order; both zeros get one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    """Invert `ordered`: return the float32 of a key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights(x: tl.tensor, best: tl.tensor, temperature: tl.tensor, least: tl.tensor) -> tl.tensor:
    """Return floor(2^40 exp((x - best) / temperature)) as int64, 0 below `least`; float32 inside.

    Reference: `kernels/reference/sampling.py`.
    """
    scaled = tl.maximum(tl.div_rn(x - best, temperature), -50.0)
    weight = (tl.exp(scaled) * 1099511627776.0).to(tl.int64)
    return tl.where(weight >= least, weight, 0)
