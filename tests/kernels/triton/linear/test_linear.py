from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from llmbox.kernels.dispatch import native_ready, select_ops
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.linear import gemm, linear
from llmbox.kernels.triton.linear import gemm_w8a8 as gemm_8_bits
from llmbox.kernels.triton.linear.fused_moe import experts_product
from llmbox.kernels.triton.linear.gemm_inner import codes_of, load_words
from llmbox.kernels.triton.linear.gemm_w8a8 import fp8_product, int8_product
from llmbox.kernels.triton.linear.linear import FP8_BLOCKS, FP8_ROWS, DenseLinear, dequantize
from llmbox.kernels.triton.linear.quantize_activations import RowFormat, quantize_rows
from llmbox.kernels.triton.linear.weight_packing import (
    group_codes,
    pack_fp8,
    pack_fp8_blocks,
    pack_grouped,
)
from llmbox.kernels.weight_packing import QuantizedWeight, to_numbers
from support.fake_quantized import fake_quantized_ops, stored_nibbles
from support.numbers import assert_near
from support.paged import CPU
from support.published_formats import stored_weight

FP8 = torch.float8_e4m3fn
INTEGERS = [
    name for name, quant in QUANTS.items() if quant.kind == "integer" and not quant.in_checkpoints_only
]
STORED = [
    name
    for name, quant in QUANTS.items()
    if quant.kind == "integer" and quant.in_checkpoints_only and not quant.rounds_head
]


def case(rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    x, bias = torch.randn(rows, inputs), torch.randn(outputs)
    return x.to(dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype), bias.to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.double() @ weight.double().T + bias.double()


@pytest.mark.parametrize("quant", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 200, 70), (18, 130, 64)])
def test_integer_weights(quant: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x, weight, bias = case(*shape, dtype)
    packed = pack_grouped(weight, QUANTS[quant])
    assert_near(gemm.product(x, packed, bias), exact(x, dequantize(packed, torch.float32), bias))
    error = (dequantize(packed, torch.float32) - weight.float()).norm() / weight.float().norm()
    assert error < {8: 0.01, 4: 0.12}[packed.bits]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_numbers_of_checkpoints_are_multiplied_as_they_are(name: str, ordered: bool) -> None:
    """Few rows in float32, many in float16, whose weights are made wide tile by tile."""
    weight = stored_weight(QUANTS[name], 70, 200, ordered=ordered)
    ops = triton_ops(CPU, torch.float32, QUANTS[name])
    assert ops.stored is not None
    packed = ops.stored.pack_quantized(weight, torch.float32)
    x, bias = torch.randn(2, 200) / 16, torch.zeros(70)
    assert_near(
        gemm.product(x[:, packed.order_I] if ordered else x, packed.weight, None),
        exact(x, weight.floats(), bias),
    )
    assert_near(ops.linear(packed, x), exact(x, weight.floats(), bias))
    many = torch.randn(gemm.WIDE_FROM, 200).half() / 16
    ops = triton_ops(CPU, torch.float16, QUANTS[name])
    assert_near(ops.linear(packed, many), exact(many, weight.floats().half(), bias))


@pytest.mark.parametrize("name", STORED)
def test_experts_of_checkpoints(name: str) -> None:
    first, second = (stored_weight(QUANTS[name], outputs, 96) for outputs in (32, 32))
    both = replace(
        first,
        codes_OI=torch.cat((first.codes_OI, second.codes_OI.flip(0))),
        scales_OG=torch.cat((first.scales_OG, second.scales_OG.flip(0))),
        zeros_OG=None if first.zeros_OG is None else torch.cat((first.zeros_OG, second.zeros_OG.flip(0))),
    )
    ops = triton_ops(CPU, torch.float32, QUANTS[name])
    assert ops.pack_experts is not None
    x = torch.randn(5, 96)
    got = experts_product(x, ops.pack_experts(both, None), torch.tensor([0, 2, 5]).int())
    wide = both.floats().view(2, 32, 96)
    assert_near(got[:2], exact(x[:2], wide[0], torch.zeros(32)))
    assert_near(got[2:], exact(x[2:], wide[1], torch.zeros(32)))


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("quant", INTEGERS)
def test_weights_are_rounded_as_on_a_cpu(quant: str) -> None:
    """But for ties between scales: sums come in another order."""
    weight = torch.randn(64, 300)
    packing = select_ops(CPU, torch.float32, torch.float32, 1, QUANTS[quant]).packing
    assert packing is not None
    wide = dequantize(pack_grouped(weight, QUANTS[quant]), torch.float32)
    same = (wide - packing.round(QUANTS[quant], weight).floats()).abs() < 1e-6
    assert same.float().mean() > 0.99


@pytest.mark.parametrize("quant", ["int8", "int4", None])
def test_split_inputs(monkeypatch: pytest.MonkeyPatch, quant: str | None) -> None:
    monkeypatch.setattr(gemm, "STEP", 32)
    monkeypatch.setattr(gemm, "num_splits", lambda *_: 3)
    x, weight, bias = case(2, 400, 40)
    packed = pack_grouped(weight, QUANTS[quant]) if quant else weight
    wide = dequantize(packed, torch.float32) if quant else weight
    assert_near(gemm.product(x, packed, bias), exact(x, wide, bias))


@pytest.mark.parametrize("quant", ["int8", "int4", "int4-g128"])
def test_wide_weights_are_those_of_the_format(quant: str) -> None:
    """Decoded here by the words of the format."""
    weight = torch.randn(37, 150)
    packed = pack_grouped(weight, QUANTS[quant])
    codes = packed.weight
    if packed.bits == 4:
        codes = stored_nibbles(codes).to(torch.int8) - 8
    if packed.steps is not None:
        codes = to_numbers((codes + 8).flatten(0, 1), packed.steps.flatten(0, 1), QUANTS[quant]).view(
            codes.shape
        )
    wide = (codes.float() * packed.scales.float().unsqueeze(-1)).transpose(0, 1).flatten(1)[:, :150]
    assert torch.equal(dequantize(packed, torch.float32), wide)
    assert codes.min() < 0 < codes.max()


@triton.jit
def codes_kernel(
    out: tl.tensor,
    weight: tl.tensor,
    offsets: tl.tensor,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    GRID: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """Write half of the codes of the first group: those at SHIFT."""
    cell, i = tl.arange(0, OUTPUTS), tl.arange(0, GROUP // 2)
    words = load_words(weight, cell, cell < OUTPUTS, GROUP // 2)
    codes = codes_of(words, SHIFT, offsets, cell, cell < OUTPUTS, GROUP, GRID, out.dtype.element_ty)
    tl.store(out + cell[:, None] * GROUP + SHIFT // 4 * (GROUP // 2) + i[None, :], codes)


@pytest.mark.parametrize("name", [name for name in (*INTEGERS, *STORED) if QUANTS[name].bits == 4])
def test_codes_from_the_bits_of_floats(name: str) -> None:
    """The same numbers in float16, without a conversion, as in float32. The interpreter has no bfloat16."""
    quant = QUANTS[name]
    if quant.in_checkpoints_only:
        packed = group_codes(stored_weight(quant, 64, 256))
    else:
        packed = pack_grouped(torch.randn(64, 256), quant)
    found, wide = (
        torch.full((64, packed.group), torch.nan, dtype=each) for each in (torch.half, torch.float)
    )
    for out in (found, wide):
        for shift in (0, 4):
            codes_kernel[(1,)](out, packed.weight, packed.offsets, shift, packed.group, packed.grid, 64)
    assert torch.equal(found.float(), wide)
    assert len(wide.unique()) > 8


def test_many_rows_multiply_wide_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "TILED_ROWS", 4)
    ops = triton_ops(CPU, torch.float16, QUANTS["int4"])
    x, weight, bias = case(5, 100, 30, torch.float16)
    packed = ops.pack_linear(weight, bias)
    wide = dequantize(packed.weight, torch.float32)
    assert_near(ops.linear(packed, x), exact(x, wide, bias))
    assert_near(ops.linear(packed, x[:2]), exact(x[:2], wide, bias))


@pytest.mark.parametrize(("quant", "splits"), [("int8", 1), ("int8-g32", 2), ("int4", 2), ("int4-g128", 1)])
def test_a_batch_of_some_hundred_rows_reads_the_integers(
    monkeypatch: pytest.MonkeyPatch, quant: str, splits: int
) -> None:
    """Weights are made wide tile by tile: the products are those of the weights made wide beforehand."""
    monkeypatch.setattr(linear, "dequantize", None)  # not called
    monkeypatch.setattr(gemm, "num_splits", lambda *_: splits)
    ops = triton_ops(CPU, torch.float16, QUANTS[quant])
    x, weight, bias = case(gemm.WIDE_FROM, 200, 70, torch.float16)
    packed = ops.pack_linear(weight, bias)
    got = ops.linear(packed, x)
    assert_near(got, exact(x, dequantize(packed.weight, torch.float16), bias))
    assert_near(ops.linear(packed, x[:3]), got[:3].double())


@pytest.mark.parametrize("quant", ["int8", "int8-g32"])
def test_integer_rows_and_weights(quant: str) -> None:
    x, weight, bias = case(3, 300, 40)
    packed = pack_grouped(weight, QUANTS[quant])
    rows = quantize_rows(x, RowFormat(torch.int8, packed.group))
    wide = rows.numbers.double() * rows.scales.repeat_interleave(packed.group, 1)[:, :300]
    got = int8_product(rows, packed, bias, torch.float32)
    assert_near(got, exact(wide, dequantize(packed, torch.float32), bias))


def spread(scales: Tensor, outputs: int, inputs: int) -> Tensor:
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs, :inputs]


@pytest.mark.parametrize("quant", ["w8a8", "fp8", "fp8-block"])
def test_split_inputs_of_8_bits(monkeypatch: pytest.MonkeyPatch, quant: str) -> None:
    ops = triton_ops(CPU, torch.float32, QUANTS[quant])
    x, weight, bias = case(3, 600, 140)
    packed = ops.pack_linear(weight, bias)
    whole = ops.linear(packed, x)
    monkeypatch.setattr(gemm_8_bits, "num_splits", lambda *_: 3)
    assert_near(ops.linear(packed, x), whole.double())


@pytest.mark.parametrize("name", ["int8", "int4", "w8a8", "fp8-block"])
def test_weights_that_a_checkpoint_holds(name: str) -> None:
    """Codes and scales of rows and groups make what rounding the weights at load makes."""
    quant = QUANTS[name]
    ops = triton_ops(CPU, torch.float32, quant)
    x, weight, bias = case(3, 300, 150)
    expected = ops.linear(ops.pack_linear(weight, bias), x)
    steps = None
    if name == "fp8-block":
        codes, blocks = pack_fp8_blocks(weight)
        scales = blocks.repeat_interleave(128, 0)[:150]
    else:
        packed = pack_grouped(weight, quant)
        wide, scales = dequantize(packed, torch.float32), packed.scales.T
        if packed.steps is not None:
            steps = packed.steps.transpose(0, 1).flatten(1)
        codes = (wide / scales.float().repeat_interleave(quant.group, 1)[:, :300]).round().to(torch.int8)
    assert ops.stored is not None
    assert ops.stored.format("linear") == quant
    got = ops.stored.pack_quantized(
        QuantizedWeight(quant, codes, scales, steps_OS=steps), torch.float32, bias
    )
    assert torch.equal(ops.linear(got, x), expected)


def test_blocks_that_were_put_together_between_their_borders() -> None:
    """As of the heads of one rank: outputs 100 .. 150 of one tensor, then 60 of another."""
    ops = triton_ops(CPU, torch.float32, QUANTS["fp8-block"])
    x, weight, bias = case(3, 300, 110)
    codes, scales = weight.to(FP8), torch.rand(110, 3) + 0.5
    scales[:28], scales[28:50], scales[50:] = scales[0], scales[28], scales[50]
    assert ops.stored is not None
    packed = ops.stored.pack_quantized(
        QuantizedWeight(QUANTS["fp8-block"], codes, scales), torch.float32, bias
    )
    assert packed.scales.shape == (110, 3)
    rows = quantize_rows(x, FP8_BLOCKS)
    wide_x = rows.numbers.double() * rows.scales.repeat_interleave(128, 1)[:, :300]
    wide_w = codes.double() * scales.repeat_interleave(128, 1)[:, :300]
    assert_near(ops.linear(packed, x), exact(wide_x, wide_w, bias))


@pytest.mark.parametrize(("name", "limit"), [("w8a8", 0.015), ("fp8-block", 0.06)])
def test_rows_and_weights_of_8_bits(name: str, limit: float) -> None:
    ops = triton_ops(CPU, torch.float32, QUANTS[name])
    x, weight, bias = case(18, 300, 150)
    want = exact(x, weight, bias)
    got = ops.linear(ops.pack_linear(weight, bias), x)
    assert 0 < (got.double() - want).norm() / want.norm() < limit
    head = ops.linear(ops.pack_head(weight, bias), x)
    if name == "fp8-block":  # not rounded
        assert_near(head, want)
        numbers, scales = pack_fp8_blocks(weight)
        assert numbers.float().abs().amax() == 448
        assert ((numbers.float() * spread(scales, 150, 300) - weight).abs() <= weight.abs() / 15 + 1e-4).all()
    else:
        assert_near(head, exact(x, dequantize(pack_grouped(weight, QUANTS["int8"]), torch.float32), bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["w8a8", "fp8", "fp8-block"])
def test_formats_mean_what_plain_torch_says(name: str, dtype: torch.dtype) -> None:
    """Rows and weights are rounded to the same bits: only sums are in another order."""
    ours, theirs = triton_ops(CPU, dtype, QUANTS[name]), fake_quantized_ops(QUANTS[name])
    x, weight, bias = case(18, 300, 150, dtype)
    for pack in ("pack_linear", "pack_head"):
        want = theirs.linear(getattr(theirs, pack)(weight, bias), x).double()
        assert_near(ours.linear(getattr(ours, pack)(weight, bias), x), want)


@pytest.mark.parametrize("pack", [pack_fp8, pack_fp8_blocks])
def test_weights_too_small_to_divide_by_are_no_nan(pack: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    numbers, scales = pack(torch.full((3, 40), 1e-38))
    assert numbers.float().isfinite().all()
    assert scales.isfinite().all()


def test_fp8_by_rows() -> None:
    x, weight, bias = case(3, 200, 40)
    rows, (numbers, scales) = quantize_rows(x, FP8_ROWS), pack_fp8(weight)
    wide_x, wide_w = rows.numbers.double() * rows.scales, numbers.double() * scales
    assert_near(fp8_product(rows, numbers, scales, bias, torch.float32), exact(wide_x, wide_w, bias))


def test_fp8_by_blocks() -> None:
    x, weight, bias = case(2, 200, 150)
    rows = quantize_rows(x, FP8_BLOCKS)
    numbers, scales = weight.to(FP8), torch.rand(2, 2) + 0.5
    wide_x = rows.numbers.double() * rows.scales.repeat_interleave(128, 1)[:, :200]
    wide_w = numbers.double() * spread(scales, 150, 200)
    assert_near(fp8_product(rows, numbers, scales, bias, torch.float32), exact(wide_x, wide_w, bias))


@pytest.mark.parametrize("quant", ["w8a8", "fp8", "fp8-block"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_linear_takes_the_rows_that_norm_and_gate_left(
    monkeypatch: pytest.MonkeyPatch, quant: str, deterministic: bool
) -> None:
    ops = triton_ops(CPU, torch.float32, QUANTS[quant], deterministic=deterministic)
    x, weight, bias = case(3, 200, 48)
    packed, one, residual = ops.pack_linear(weight, bias), torch.ones(200), torch.randn(3, 200)
    ops = ops.before(packed)
    quantize = linear.quantize_rows
    for before in (
        lambda: ops.rms_norm(x, one, 1e-6),
        lambda: ops.add_rms_norm(x, residual, one, 1e-6),
        lambda: ops.gate_mul(torch.cat((x, residual), 1), "silu"),
    ):
        left = before()
        monkeypatch.setattr(linear, "quantize_rows", quantize)
        expected = ops.linear(packed, left.clone())
        assert (expected.double() - exact(left, weight, bias)).norm() / expected.norm() < 0.06
        monkeypatch.setattr(linear, "quantize_rows", None)  # not called
        assert torch.equal(ops.linear(packed, left), expected)


@pytest.mark.parametrize("quant", [None, "int4", "fp8", "w8a8", "fp8-block"])
def test_fixed_order(quant: str | None) -> None:
    """A row has the same bits alone and among others, in any launch."""
    ops = triton_ops(CPU, torch.float16, QUANTS.get(quant or ""), deterministic=True)
    x, weight, bias = case(20, 600, 40, torch.float16)
    packed = ops.pack_linear(weight, bias)
    together = ops.linear(packed, x)
    for rows in (1, 17):
        assert torch.equal(ops.linear(packed, x[:rows].clone()), together[:rows])
    if quant is None:
        assert_near(together, exact(x, weight, bias))


def test_experts() -> None:
    weight = torch.randn(4, 40, 50) / 7
    x, starts = torch.randn(25, 50), [0, 3, 3, 20, 25]
    got = experts_product(x, DenseLinear(weight.flatten(0, 1), None), torch.tensor(starts, dtype=torch.int32))
    for expert, (first, end) in enumerate(pairwise(starts)):
        assert_near(got[first:end], x[first:end].double() @ weight[expert].double().T)
