"""Logits as integers of the same order, and as the integer weights of `engine/sampler/weights.py`."""

import triton
import triton.language as tl


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Float32 -> int32 of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights(x: tl.tensor, best: tl.tensor, temperature: tl.tensor, least: tl.tensor) -> tl.tensor:
    scaled = tl.maximum(tl.div_rn(x - best, temperature), -50.0)
    weight = (tl.exp(scaled) * 1099511627776.0).to(tl.int64)
    return tl.where(weight >= least, weight, 0)
