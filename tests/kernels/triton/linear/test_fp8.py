"""E4M3 with one scale for all rows, and the choice between our products and PyTorch's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbox.kernels.dispatch import UnknownBackend, select_ops
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.triton import elementwise
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.elementwise import gate_rows, norm_rows
from llmbox.kernels.triton.linear import linear
from llmbox.kernels.triton.linear import scaled_mm_choice as choice
from llmbox.kernels.triton.linear.gemm_w8a8 import fits_scaled_mm
from llmbox.kernels.triton.linear.linear import (
    FP8_BLOCKS,
    FP8_ROWS,
    DenseLinear,
    Fp8BlockLinear,
    Fp8Linear,
    Linear,
)
from llmbox.kernels.triton.linear.quantize_activations import RowFormat, Rows8, quantize_rows
from llmbox.kernels.triton.linear.scaled_mm_choice import ScaledMMSelector, sharing_of, why_not
from llmbox.kernels.weight_packing import QuantizedWeight
from support.fake_quantized import fake_quantize_static, fake_quantized_ops
from support.numbers import assert_near
from support.paged import CPU

FP8 = torch.float8_e4m3fn
GIVEN = torch.tensor([0.004])
GIVEN_ROWS = FP8_ROWS._replace(given=GIVEN)
BFLOAT16 = torch.bfloat16


def same_bits(got: Rows8, expected: Rows8) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def floats8(outputs: int, inputs: int, scales: Tensor | None = None, **fields: Any) -> Fp8Linear:
    weight = torch.randn(outputs, inputs).to(FP8)
    return Fp8Linear(weight, torch.rand(outputs, 1) + 0.5 if scales is None else scales, None, **fields)


def one_scale(outputs: int, inputs: int) -> Fp8Linear:
    """Of a checkpoint with static activations."""
    scale = torch.tensor([0.7])
    return floats8(outputs, inputs, scale.expand(outputs, 1).contiguous(), given=GIVEN, one_1=scale)


def blocks8(outputs: int, inputs: int) -> Fp8BlockLinear:
    scales = torch.rand(outputs // 128, inputs // 128) + 0.5
    return Fp8BlockLinear(torch.randn(outputs, inputs).to(FP8), scales, None)


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_a_given_scale_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    """Bit by bit: what is too large becomes the largest, what is not finite stays so."""
    x = (torch.randn(6, 300) * torch.logspace(-3, 2, 6)[:, None]).to(dtype)
    x[1], x[2, 5], x[3, 299] = 0, torch.nan, -torch.inf
    rows = quantize_rows(x, GIVEN_ROWS)
    wide = rows.numbers.float() * GIVEN
    torch.testing.assert_close(wide, fake_quantize_static(x, GIVEN), rtol=0, atol=0, equal_nan=True)
    assert wide[5].abs().max() == pytest.approx(448 * 0.004)
    assert rows.scales.squeeze(1).isnan().tolist() == [False, False, True, True, False, False]
    assert torch.equal(rows.scales[4], GIVEN)


@pytest.mark.parametrize("width", [40, 2200])
def test_norms_and_gates_leave_rows_of_a_given_scale(width: int) -> None:
    x, residual, weight = torch.randn(3, width), torch.randn(3, width), torch.randn(width)
    normed, left = norm_rows(x, residual, weight, 1e-6, GIVEN_ROWS)
    assert left is not None
    same_bits(left, quantize_rows(normed, GIVEN_ROWS))
    gated, left = gate_rows(torch.cat((x, residual), 1), "silu", GIVEN_ROWS)
    assert left is not None
    same_bits(left, quantize_rows(gated, GIVEN_ROWS))


@pytest.mark.parametrize("row_format", [FP8_ROWS, FP8_BLOCKS])
def test_memory_of_rows_that_only_fill_up_is_there(row_format: Any) -> None:
    rows = quantize_rows(torch.randn(5, 300), row_format)
    whole = rows.whole()
    assert whole.numbers.shape == (16, 300)
    assert whole.numbers.is_contiguous()
    assert whole.scales.t().is_contiguous()
    assert whole.scales.shape == (16, rows.scales.shape[1])
    same_bits(Rows8(whole.numbers[:5], whole.scales[:5]), rows)


# ------------------------------------------------------------------ weights of a checkpoint


@pytest.mark.parametrize("name", ["fp8-static", "fp8-dynamic"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_stacked_tensors_keep_their_scales(name: str, deterministic: bool) -> None:
    quant = QUANTS[name]
    given = GIVEN if name == "fp8-static" else None
    scales = torch.cat((torch.full((20, 1), 0.01), torch.full((30, 1), 3.0)))
    rounded = QuantizedWeight(quant, torch.randn(50, 300).to(FP8), scales, given)
    bias, x = torch.randn(50), torch.randn(18, 300)
    ours, theirs = (
        triton_ops(CPU, torch.float32, quant, deterministic=deterministic),
        fake_quantized_ops(quant),
    )
    assert ours.stored is not None
    assert theirs.stored is not None
    packed = ours.stored.pack_quantized(rounded, torch.float32, bias)
    assert packed.one_1 is None
    want = theirs.linear(theirs.stored.pack_quantized(rounded, torch.float32, bias), x).double()
    assert_near(ours.linear(packed, x), want)
    alone = ours.linear(packed, x[:1].clone())
    assert torch.equal(alone, ours.linear(packed, x)[:1]) or not deterministic
    same = ours.stored.pack_quantized(replace(rounded, scales_OG=scales[:1].expand(50, 1)), torch.float32)
    assert same.one_1.tolist() == scales[0].tolist()
    assert type(ours.pack_head(torch.randn(8, 300), None)) is DenseLinear


def test_norms_and_gates_leave_rows_of_a_linears_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = triton_ops(CPU, torch.float32, QUANTS["fp8-static"])
    norms = [torch.rand(64) + 0.5 for _ in range(2)]
    linears = [floats8(96, 64, given=torch.tensor([scale])) for scale in (0.01, 0.02)]
    downs = [floats8(64, 48, given=torch.tensor([scale])) for scale in (0.03, 0.04)]
    head = DenseLinear(torch.randn(8, 64), None)
    rounded = []
    monkeypatch.setattr(linear, "quantize_rows", lambda *args: rounded.append(0) or quantize_rows(*args))

    def step(x: Tensor, residual: Tensor, *, fused: bool) -> Tensor:
        """Two layers, and a head that reads a norm too."""
        for norm, up, down in zip(norms, linears, downs, strict=True):
            to_up, to_down = (ops.before(up), ops.before(down)) if fused else (ops, ops)
            inner = to_down.gate_mul(ops.linear(up, to_up.add_rms_norm(x, residual, norm, 1e-6)), "silu")
            x = ops.linear(down, inner)
        return ops.linear(head, ops.before(head).rms_norm(x, norms[0], 1e-6))

    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    apart = step(x.clone(), residual.clone(), fused=False)
    assert len(rounded) == 4
    assert torch.equal(step(x.clone(), residual.clone(), fused=True), apart)
    assert len(rounded) == 4
    other = floats8(96, 64, given=torch.tensor([0.5]))
    wide = ops.before(linears[0]).rms_norm(x, norms[0], 1e-6)
    # Not what was written for another.
    assert torch.equal(ops.linear(other, wide), ops.linear(other, wide.clone()))
    assert len(rounded) == 6


@pytest.mark.parametrize("name", ["fp8-block", "fp8-dynamic"])
def test_a_norm_of_another_kernel_leaves_rows_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Unless it cannot: then the linear rounds them."""
    ops = triton_ops(CPU, torch.float32, QUANTS[name])
    packed = blocks8(256, 128) if name == "fp8-block" else floats8(256, 128)
    x, weight = torch.randn(3, 128), torch.rand(128)
    rounded: list[int] = []
    monkeypatch.setattr(linear, "quantize_rows", lambda *args: rounded.append(0) or quantize_rows(*args))

    def norm(row_format: RowFormat | None) -> tuple[Tensor, Rows8 | None]:
        return norm_rows(x, None, weight, 1e-6, row_format)

    expected = ops.linear(packed, ops.fused_norm(lambda _: norm(None)))
    assert len(rounded) == 1
    assert torch.equal(ops.linear(packed, ops.before(packed).fused_norm(norm)), expected)
    assert len(rounded) == 1


def test_nothing_is_left_for_unquantized_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = triton_ops(CPU, torch.float32, QUANTS["fp8-block"])
    assert ops.before(DenseLinear(torch.randn(256, 128), None)) is ops
    assert ops.before(None) is ops
    written = []
    monkeypatch.setattr(elementwise, "norm_rows", lambda *args: written.append(args[-1]) or norm_rows(*args))
    monkeypatch.setattr(elementwise, "gate_rows", lambda *args: written.append(args[-1]) or gate_rows(*args))
    packed = blocks8(256, 128)
    for each in (ops, ops.before(packed)):
        each.gate_mul(each.linear(packed, each.rms_norm(torch.randn(3, 128), torch.ones(128), 1e-6)), "silu")
    assert [found is None for found in written] == [True, True, False, False]


# ------------------------------------------------------------------ which way a linear takes


def test_what_scales_are_to_torch() -> None:
    assert sharing_of(one_scale(32, 48)) == "tensor"
    assert sharing_of(floats8(32, 48)) == "rows"
    assert sharing_of(floats8(32, 48, given=GIVEN)) == "rows"
    assert sharing_of(floats8(32, 48, one_1=torch.ones(1))) == "rows"
    assert sharing_of(blocks8(256, 512)) == "blocks"
    assert sharing_of(floats8(30, 48)) is sharing_of(floats8(32, 40)) is None
    assert sharing_of(blocks8(256, 640)) is None  # 5 scales, which would have to be filled up to 8
    apart = Fp8BlockLinear(torch.randn(256, 512).to(FP8), torch.rand(256, 4), None)
    assert sharing_of(apart) is None
    assert sharing_of(DenseLinear(torch.randn(32, 48), None)) is None


def test_one_linear_of_each_shape_is_tried() -> None:
    asked = []

    def probe(packed: Linear, dtype: torch.dtype) -> str | None:
        asked.append((packed.weight_OI.shape, packed.by_torch, dtype))
        return "no kernel" if packed.weight_OI.shape[0] == 256 else None

    made = ScaledMMSelector(BFLOAT16, probe)
    linears = [one_scale(32, 48), floats8(32, 48), blocks8(256, 512), blocks8(128, 512), floats8(30, 48)]
    for _ in range(2):
        ways = [made.of(one).by_torch for one in linears]
        assert ways == ["tensor", "rows", None, "blocks", None]
    assert [(tuple(shape), way) for shape, way, _ in asked] == [
        ((32, 48), "tensor"),
        ((32, 48), "rows"),
        ((256, 512), "blocks"),
        ((128, 512), "blocks"),
    ]
    plain = DenseLinear(torch.randn(4, 4), None)
    assert made.of(plain) is plain


@pytest.mark.parametrize("deterministic", [False, True])
def test_models_take_what_the_probe_allows(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    monkeypatch.setattr(choice, "why_not", lambda *_: None)
    for name, way in (("fp8", "rows"), ("fp8-block", "blocks"), ("fp8-dynamic", "rows")):
        ops = triton_ops(CPU, BFLOAT16, QUANTS[name], deterministic=deterministic)
        expected = None if deterministic else way
        assert ops.pack_linear(torch.randn(128, 512).to(BFLOAT16), None).by_torch == expected
    ops = triton_ops(CPU, BFLOAT16, QUANTS["fp8-static"], deterministic=deterministic)
    rounded = QuantizedWeight(
        QUANTS["fp8-static"], torch.randn(32, 64).to(FP8), torch.full((32, 1), 0.5), GIVEN
    )
    assert ops.stored is not None
    packed = ops.stored.pack_quantized(rounded, BFLOAT16)
    assert packed.by_torch == (None if deterministic else "tensor")
    head = triton_ops(CPU, BFLOAT16, QUANTS["fp8"]).pack_head(torch.randn(32, 64).to(BFLOAT16), None)
    assert head.by_torch == "rows"


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_not", lambda *_: None)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    weight = torch.randn(32, 64).to(BFLOAT16)
    for asked, way in (("", "rows"), ("triton", None)):
        monkeypatch.setenv("LLMBOX_FP8", asked)
        ops = select_ops(CPU, BFLOAT16, quant=QUANTS["fp8"])
        assert ops.pack_linear(weight, None).by_torch == way
    monkeypatch.setenv("LLMBOX_FP8", "cublas")
    with pytest.raises(UnknownBackend, match=r"LLMBOX_FP8=cublas: use triton"):
        select_ops(CPU, BFLOAT16, quant=QUANTS["fp8"])


def as_cublas(x: Tensor, weight: Tensor, **given: Any) -> Tensor:
    """One scale for all really by PyTorch, others by their words, with what ScaledBlas.cpp checks of them."""
    scale_a, scale_b, dtype = given["scale_a"], given["scale_b"], given["out_dtype"]
    if scale_a.dim() == 1:
        return REAL(x, weight, **given)
    rows, inputs = x.shape
    if scale_a.shape[1] == 1:  # PyTorch has it on CPUs too, from 2.13 on
        assert scale_a.shape == (rows, 1)
        assert scale_b.shape == (1, weight.shape[1])
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        return (x.float() * scale_a @ (weight.float() * scale_b)).to(dtype)
    assert x.is_contiguous()
    assert weight.t().is_contiguous()
    assert scale_a.shape == (rows, inputs // 128)
    assert scale_a.stride() == (1, rows)
    assert rows % 4 == 0
    assert scale_b.t().shape == (weight.shape[1] // 128, inputs // 128)
    assert scale_b.t().is_contiguous()
    assert inputs // 128 % 4 == 0
    wide_x = x.float() * scale_a.repeat_interleave(128, 1)
    wide_w = weight.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (wide_x.nan_to_num() @ wide_w).to(dtype)


REAL = torch._scaled_mm


@pytest.mark.parametrize("make", [one_scale, floats8, blocks8])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_both_ways_give_the_same(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int, int], Fp8Linear | Fp8BlockLinear], rows: int
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", as_cublas)
    ops = triton_ops(CPU, torch.float16, QUANTS["fp8-block" if make is blocks8 else "fp8-static"])
    packed = replace(make(128, 512), bias_O=torch.randn(128).half())
    x = torch.randn(rows, 512).half()
    want = ops.linear(packed, x)
    monkeypatch.setattr("llmbox.kernels.triton.linear.linear.fp8_product", None)  # not called
    got = ops.linear(replace(packed, by_torch=sharing_of(packed)), x)
    assert got.shape == (rows, 128)
    torch.testing.assert_close(got, want, rtol=4e-3, atol=0.05)


def flipped(scales: Tensor) -> Tensor:
    """Of other groups, or other rows; in the same layout."""
    return scales.t().flip(0 if scales.shape[1] > 1 else 1).contiguous().t()


def probed(monkeypatch: pytest.MonkeyPatch, packed: Fp8Linear | Fp8BlockLinear, multiply: Any) -> str | None:
    """The probe's words where `torch._scaled_mm` is `multiply`."""
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(choice, "ROWS", (1, 5))
    monkeypatch.setattr(choice, "is_on_gpu", lambda _: True)
    return why_not(replace(packed, by_torch=sharing_of(packed)), BFLOAT16)


@pytest.mark.parametrize("make", [one_scale, floats8, blocks8])
def test_the_probe_multiplies(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[int, int], Fp8Linear | Fp8BlockLinear]
) -> None:
    packed = make(384, 512)  # more outputs than are compared
    assert probed(monkeypatch, packed, as_cublas) is None
    biased = replace(packed, bias_O=torch.full((384,), 1e4))
    assert probed(monkeypatch, biased, as_cublas) is None

    def refuses(*_: object, **__: object) -> Tensor:
        raise NotImplementedError("only supported in CUDA for SM90\nmore")

    says = probed(monkeypatch, packed, refuses)
    assert says == "torch._scaled_mm: NotImplementedError: only supported in CUDA for SM90"
    says = probed(monkeypatch, packed, lambda *args, **given: as_cublas(*args, **given) * 1.05)
    assert says == "torch._scaled_mm is off by 5.0%"
    says = probed(monkeypatch, packed, lambda *args, **given: as_cublas(*args, **given) * torch.nan)
    assert says == "torch._scaled_mm is off by inf%"
    if make is not one_scale:  # which has no other place
        turned = lambda *args, **given: as_cublas(*args, **given | {"scale_a": flipped(given["scale_a"])})  # noqa: E731
        assert "off by" in (probed(monkeypatch, packed, turned) or "")
    lost = lambda *args, **given: as_cublas(*args, **given).index_fill_(0, torch.tensor([0]), 0)  # noqa: E731
    assert probed(monkeypatch, packed, lost) is not None


def test_where_it_is_not_tried() -> None:
    assert why_not(one_scale(32, 48), BFLOAT16) == "not on a GPU"
    assert fits_scaled_mm("blocks", 128, 1024)
    assert not fits_scaled_mm("blocks", 64, 1024)


def test_results_in_float32_stay_with_our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "is_on_gpu", lambda _: True)
    assert "float32" in (why_not(one_scale(32, 48), torch.float32) or "")
