"""Arithmetic that rounds as `kernels/cpu/native/vector/simd.h` does, operation by operation.

Every launch of a kernel with these passes `enable_fp_fusion=False`. Fused are `multiply_add`s alone.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 16
"""Partial sums of a sum over a row: number i goes to sum i mod 16."""
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SUM_LANES = tl.constexpr(LANES)


@triton.jit
def multiply_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Return a * b + c of float32, rounded once.

    The interpreter's `tl.fma` rounds twice. There the exact product is added in float64, rounded to odd, as
    on CPUs without the instruction.
    """
    if INTERPRETED:
        product = a.to(tl.float64) * b.to(tl.float64)
        added = c.to(tl.float64)
        total = product + added
        back = total - product
        lost = (product - (total - back)) + (added - back)
        bits = total.to(tl.int64, bitcast=True)
        inexact = (lost > 0) | (lost < 0)
        odd = bits + tl.where((lost > 0) == (total > 0), 1, -1)
        bits = tl.where(inexact & ((bits & 1) == 0), odd, bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """Convert bfloat16 or float32 to float32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 to `dtype`: to bfloat16 to nearest even, denormals to zero. The interpreter's conversion
    cuts bits off.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7F800000) == 0, bits & -2147483648, bits)
        bits = tl.where(x == x, bits, 0x7FC00000)  # noqa: PLR0124 - false for NaN
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, high, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)  # noqa: PLR0124
    return x.to(dtype)


@triton.jit
def over_lanes(x: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Add the lanes of [ROWS, 16]: the upper half to the lower one until one is left."""
    x = tl.sum(tl.reshape(x, (ROWS, 2, 8)), 1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 4)), 1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 2)), 1)
    return tl.sum(x, 1)


@triton.jit
def quotient(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return a / b of float32, rounded to nearest."""
    return tl.div_rn(a, b)


@triton.jit
def constant(value: tl.constexpr, like: tl.tensor) -> tl.tensor:
    """Return float32 numbers that all are `value`, in the shape of another tensor."""
    return tl.full(like.shape, value, tl.float32)


@triton.jit
def exp_negative(x: tl.tensor) -> tl.tensor:
    """Return e^x for x <= 0; 0 below -87, NaN for NaN."""
    t = tl.where(x > -87.0, x, -87.0) * 1.44269504
    shifted = t + 12582912.0
    n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    f = t - (shifted - 12582912.0)
    p = multiply_add(constant(1.535336188319500e-4, f), f, constant(1.339887440266574e-3, f))
    p = multiply_add(p, f, constant(9.618437357674640e-3, f))
    p = multiply_add(p, f, constant(5.550332471162809e-2, f))
    p = multiply_add(p, f, constant(2.402264791363012e-1, f))
    p = multiply_add(p, f, constant(6.931472028550421e-1, f))
    p = multiply_add(p, f, constant(1.0, f))
    result = (p.to(tl.int32, bitcast=True) + (n << 23)).to(tl.float32, bitcast=True)
    result = tl.where(x < -87.0, 0.0, result)
    return tl.where(x == x, result, x)  # noqa: PLR0124 - false for NaN


@triton.jit
def power_of_two(x: tl.tensor) -> tl.tensor:
    """Return 2^x; 0 for -infinity, NaN for NaN."""
    x = tl.where(x < -160.0, -160.0, tl.where(x > 160.0, 160.0, x))
    whole = tl.floor(x)
    f = x - whole
    f = tl.where(f + whole > x, (f.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), f)
    p = multiply_add(constant(1.87757667e-3, f), f, constant(8.98934009e-3, f))
    p = multiply_add(p, f, constant(5.58263181e-2, f))
    p = multiply_add(p, f, constant(2.40153617e-1, f))
    p = multiply_add(p, f, constant(6.93153073e-1, f))
    p = multiply_add(p, f, constant(9.99999925e-1, f))
    n = whole.to(tl.int32)
    first = n >> 1
    low = ((first + 127) << 23).to(tl.float32, bitcast=True)
    return p * low * ((n - first + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh, near 0 by a series; NaN for NaN."""
    size = tl.abs(x)
    e = exp_negative(size * -2.0)
    far = quotient(1.0 - e, 1.0 + e)
    far = tl.where(x < 0, -far, far)
    square = x * x
    p = constant(2.18694885e-2, x)
    p = multiply_add(p, square, constant(-5.39682540e-2, x))
    p = multiply_add(p, square, constant(1.33333333e-1, x))
    p = multiply_add(p, square, constant(-3.33333333e-1, x))
    return tl.where(size < 0.25, multiply_add(p * square, x, x), far)


@triton.jit
def range_of(x: tl.tensor, real: tl.tensor) -> tl.tensor:
    """Return the largest magnitude of each row of [ROWS, WIDTH], and whether all of it is finite."""
    size = tl.where(real, tl.abs(x), 0.0)
    return tl.max(tl.where(size < float("inf"), size, 0.0), 1), tl.sum(size, 1) < float("inf")


@triton.jit
def codes_of_rows(x: tl.tensor, most: tl.tensor, finite: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Round rows to int32 codes, LARGEST / most times x to nearest even; zeros where a row is not finite."""
    counts = finite & (most > 0)
    inverse = tl.where(counts, quotient(constant(LARGEST, most), tl.where(counts, most, 1.0)), 0.0)
    scaled = tl.where(finite[:, None], x, 0.0) * inverse[:, None]
    return (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def scale_of_rows(most: tl.tensor, finite: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Return the scale most / LARGEST of each row; NaN where it is not finite, so that it stays one."""
    return tl.where(finite, quotient(most, constant(LARGEST, most)), float("nan"))


SINES = (
    1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
    -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01,
)  # fmt: skip
COSINES = (
    -1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
    2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02,
)  # fmt: skip


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of float32 angles below 10^6. C++: `turn` in `native/elementwise.h`."""
    x = angle.double()
    shift = 6755399441055744.0
    count = x * 6.36619772367581382433e-01 + shift - shift
    rest = x - count * 1.57079632673412561417e00 - count * 6.07710050650619224932e-11
    z = rest * rest
    odd, even = torch.zeros_like(z), torch.zeros_like(z)
    for sine, cosine in zip(SINES, COSINES, strict=True):
        odd, even = odd * z + sine, even * z + cosine
    s = (rest + rest * z * odd).float()
    c = (1 - (0.5 * z - z * z * even)).float()
    quarter = count.long() & 3
    sides = torch.stack((c, -s, -c, s)), torch.stack((s, c, -s, -c))
    cos, sin = (each.gather(0, quarter.unsqueeze(0)).squeeze(0) for each in sides)
    return cos, sin
