"""Norms, gates, rotation, cache writes and embeddings, against the reference operation by operation."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from llmbox.kernels.activation import Activation
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.reference.kv_cache import quantize_dynamic
from llmbox.kernels.triton.attention.kv_cache import LARGEST
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.elementwise import gate_rows, norm_rows
from llmbox.kernels.triton.linear.linear import FP8_BLOCKS, FP8_ROWS
from llmbox.kernels.triton.linear.quantize_activations import RowFormat, Rows8, quantize_rows
from support.lanes import nightly
from support.numbers import TOLERANCE
from support.paged import CPU, PagedStep

ACTIVATIONS = [name for name in get_args(Activation) if name != "xielu"]  # that one has numbers
OPS = triton_ops(CPU, torch.float32)
DTYPES = [torch.float32, torch.float16]
EIGHT_BITS = [torch.int8, torch.float8_e4m3fn]


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, **TOLERANCE[expected.dtype])


def assert_rows8(rows: Rows8, exact: Tensor) -> None:
    """A scale is the largest number over the largest of the format; numbers are rounded to nearest."""
    largest = LARGEST[rows.numbers.dtype]
    torch.testing.assert_close(rows.scales, exact.float().abs().amax(1, keepdim=True) / largest)
    error = (rows.numbers.float() * rows.scales - exact.float()).abs()
    step = rows.scales if rows.numbers.dtype == torch.int8 else exact.float().abs() / 8 + rows.scales / 64
    assert (error <= 0.51 * step + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 123)])
def test_norms(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[1]))
    same(OPS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    ours, theirs = residual.clone(), residual.clone()
    same(OPS.add_rms_norm(x, ours, weight, 1e-6), REFERENCE.add_rms_norm(x.clone(), theirs, weight, 1e-6))
    same(ours, theirs)
    heads = torch.randn(3, 6, 20).to(dtype)[:, :4]
    weights = torch.randn(4, 20).to(dtype)
    same(OPS.rms_norm(heads, weights, 1e-6), REFERENCE.rms_norm(heads, weights, 1e-6))


@pytest.mark.parametrize("eight", EIGHT_BITS)
def test_quantized_rows(eight: torch.dtype) -> None:
    x = torch.randn(3, 100)
    assert_rows8(quantize_rows(x, RowFormat(eight, None)), x)
    groups = quantize_rows(x, RowFormat(eight, 32))
    for g, part in enumerate(x.split(32, 1)):
        assert_rows8(Rows8(groups.numbers[:, 32 * g : 32 * g + 32], groups.scales[:, g : g + 1]), part)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_format", [RowFormat(torch.int8, 128), FP8_BLOCKS, FP8_ROWS])
def test_rows_are_rounded_as_plain_torch_rounds_them(dtype: torch.dtype, row_format: RowFormat) -> None:
    """Bit by bit, so also where a number lies halfway between two codes."""
    x = (torch.randn(40, 256) * torch.logspace(-6, 3, 40)[:, None]).to(dtype)
    x[3], x[4] = 0, 0
    x[4, :9] = 1e-38
    codes, scales = quantize_dynamic(x.view(40, -1, row_format.group or 256), row_format.dtype)
    same_bits(quantize_rows(x, row_format), Rows8(codes.flatten(1), scales))


def same_bits(got: Rows8 | None, expected: Rows8) -> None:
    assert got is not None
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("row_format", [RowFormat(torch.int8, 128), FP8_BLOCKS, FP8_ROWS])
@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (torch.float16, 40),
        (torch.float32, 300),
        (torch.float16, 2200),
        *(nightly(torch.float32, width) for width in (40, 128, 2200)),
        *(nightly(torch.float16, width) for width in (128, 300)),
    ],
)
def test_fused_rows_are_those_of_a_pass_of_their_own(
    dtype: torch.dtype, row_format: RowFormat, width: int
) -> None:
    """Bit by bit: narrower than a group, a short last group, more than one program a row; zeros and NaN."""
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((5, width), (5, width), (width,)))
    for rows in (x, residual):
        rows[1], rows[2, : width // 2] = 0, 0
    x[3, width - 1] = torch.nan
    normed, eight = norm_rows(x, None, weight, 1e-6, row_format)
    assert torch.equal(normed[:3], norm_rows(x, None, weight, 1e-6, None)[0][:3])
    same_bits(eight, quantize_rows(normed, row_format))
    ours, theirs = residual.clone(), residual.clone()
    normed, eight = norm_rows(x, ours, weight, 1e-6, row_format)
    assert torch.equal(normed[:3], norm_rows(x, theirs, weight, 1e-6, None)[0][:3])
    assert torch.equal(ours[:3], theirs[:3])
    same_bits(eight, quantize_rows(normed, row_format))
    gates = torch.cat((x, residual), 1)
    for activation in ACTIVATIONS:
        gated, eight = gate_rows(gates, activation, row_format)
        assert torch.equal(gated[:3], OPS.gate_mul(gates, activation)[:3])
        same_bits(eight, quantize_rows(gated, row_format))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x = torch.randn(2, 40)
    x[0, 7] = bad
    numbers, scales = quantize_rows(x, RowFormat(torch.int8, None))
    assert scales[0].isnan().all()
    assert scales[1].isfinite().all()
    assert numbers[1].abs().max() == 127


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(dtype: torch.dtype, activation: Activation) -> None:
    x = torch.randn(3, 2 * 37).to(dtype)
    same(OPS.gate_mul(x, activation), REFERENCE.gate_mul(x.clone(), activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * 37) * torch.logspace(-3, 3, 2 * 37)).to(dtype)
    same(OPS.softcap(x, 30.0), REFERENCE.softcap(x.clone(), 30.0))
    assert OPS.softcap(torch.full((1, 1), torch.nan), 30.0).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_weights_in_float32(dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(3, 40).to(dtype),
        torch.randn(3, 40).to(dtype),
        1 + torch.randn(40) / 100,
    )
    same(OPS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    expected = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-6)
    same(OPS.add_rms_norm(x, residual, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_times_a_scale(dtype: torch.dtype) -> None:
    weight, ids = torch.randn(50, 27).to(dtype), torch.tensor([3, 49, 0, 3])
    ops = triton_ops(CPU, dtype)
    assert torch.equal(ops.embedding(ops.pack_embedding(weight, False), ids, 50.5), weight[ids] * 50.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotated_heads_are_written(dtype: torch.dtype, normed: bool, head_dim: int) -> None:
    step = PagedStep([(5, 1), (0, 3)], head_dim=head_dim, dtype=dtype)
    qkv = torch.randn(4, 8, head_dim).to(dtype)
    norm = torch.randn(6, head_dim).to(dtype) if normed else None
    cos, sin = torch.randn(4, head_dim), torch.randn(4, head_dim)
    ragged = step.ragged([(5, 6), (0, 3)])
    cache = OPS.make_kv_cache(step.shape(), CPU)
    q = OPS.rotate_and_write(qkv, norm, 1e-6, cos, sin, cache, 1, OPS.plan_attention(ragged, cache, None))
    qk = qkv[:, :6] if norm is None else REFERENCE.rms_norm(qkv[:, :6], norm, 1e-6)
    qk = REFERENCE.rotary(qk, cos, sin)
    same(q, qk[:, :4])
    block, offset = ragged.slots_T // 16, ragged.slots_T % 16
    same(cache.k[1, block, :, offset], qk[:, 4:])
    same(cache.v[1, block, :, offset], qkv[:, 6:])
    assert int(cache.k.isfinite().sum()) == qk[:, 4:].numel()
    same(OPS.rotary(qkv[:, :6], cos, sin), REFERENCE.rotary(qkv[:, :6], cos, sin))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(9, 3), (16, 2), (3, 1)])
def test_heads_that_programs_share(query_heads: int, kv_heads: int, kv_dtype: torch.dtype) -> None:
    """Queries, keys and values may meet in one program, and the last one may have fewer heads than others."""
    step = PagedStep([(14, 3)], heads=(query_heads, kv_heads), kv_dtype=kv_dtype)
    rotated = query_heads + kv_heads
    qkv, norm = torch.randn(3, rotated + kv_heads, 64), torch.randn(rotated, 64)
    cos, sin = torch.randn(3, 64), torch.randn(3, 64)
    cache, wanted = (OPS.make_kv_cache(step.shape(), CPU) for _ in range(2))
    for each in (cache, wanted):  # whatever is written beside its place shows
        for tensor in (each.k, each.v, each.k_scale, each.v_scale):
            tensor.fill_(7)
    plan = OPS.plan_attention(step.ragged([(14, 17)]), cache, None)
    q = OPS.rotate_and_write(qkv, norm, 1e-6, cos, sin, cache, 1, plan)
    qk = REFERENCE.rotary(REFERENCE.rms_norm(qkv[:, :rotated], norm, 1e-6), cos, sin)
    same(q, qk[:, :query_heads])
    OPS.write_kv(wanted, 1, qk[:, query_heads:], qkv[:, rotated:], plan)
    assert torch.equal(cache.v, wanted.v)
    same(cache.v_scale, wanted.v_scale)
    same(cache.k_scale, wanted.k_scale)
    assert (cache.k.float() - wanted.k.float()).abs().max() <= (1 if kv_dtype == torch.int8 else 1e-5)


@pytest.mark.parametrize("eight", EIGHT_BITS)
def test_keys_and_values_in_eight_bits(eight: torch.dtype) -> None:
    step = PagedStep([(0, 3)], kv_dtype=eight)
    cache = OPS.make_kv_cache(step.shape(), CPU)
    step.write(OPS, cache, [(0, 3)], 1)
    block = step.tables[0][0]
    for numbers, scales, exact in ((cache.k, cache.k_scale, step.k[0]), (cache.v, cache.v_scale, step.v[0])):
        rows = Rows8(numbers[1, block, :, :3].flatten(0, 1), scales[1, block, :, :3].reshape(-1, 1))
        assert_rows8(rows, exact.transpose(0, 1).flatten(0, 1))


@pytest.mark.parametrize("quant", [None, "int8", "int4", "fp8"])
def test_embeddings(quant: str | None) -> None:
    ops = triton_ops(CPU, torch.float32, QUANTS.get(quant or ""))
    weight, ids = torch.randn(50, 70), torch.tensor([3, 49, 0, 3])
    exact = ops.embedding(ops.pack_embedding(weight, False), ids)
    assert torch.equal(exact, weight[ids])
    tied = ops.embedding(ops.pack_embedding(weight, True), ids)
    torch.testing.assert_close(tied, weight[ids], atol={None: 0.0, "fp8": 0.2}.get(quant, 0.02), rtol=0)
