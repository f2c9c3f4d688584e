"""The formats of GPUs in plain torch, against their words."""

import pytest
import torch

from llmbox.kernels.op_types import KVShape
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.reference.kv_cache import FP8, quantize_dynamic
from support.fake_quantized import (
    fake_quantize,
    fake_quantize_rows,
    fake_quantize_weights,
    fake_quantized_ops,
)
from support.numbers import assert_near

CPU = torch.device("cpu")
FORMATS = ["w8a8", "fp8", "fp8-block"]


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.int8, 127), (FP8, 448)])
def test_the_largest_size_is_exact_and_others_are_near(dtype: torch.dtype, largest: float) -> None:
    rows = torch.randn(5, 3, 40)
    rows[1] = 0
    codes, scales = quantize_dynamic(rows, dtype)
    assert codes.float().abs().amax(-1)[0].tolist() == [largest] * 3
    wide = fake_quantize(rows, dtype)
    step = scales.unsqueeze(-1) if dtype == torch.int8 else rows.abs() / 8 + scales.unsqueeze(-1) / 64
    assert ((wide - rows).abs() <= 0.51 * step).all()
    rows[2, 1, 7] = torch.inf
    codes, scales = quantize_dynamic(rows, dtype)
    assert scales[2].isnan().tolist() == [False, True, False]
    assert not codes[2, 1, :7].float().any()


@pytest.mark.parametrize("inputs", [128, 300])
def test_which_numbers_share_a_scale(inputs: int) -> None:
    """Each group alone gives what it gives among others."""
    x = torch.randn(200, inputs)
    for dtype in (torch.int8, FP8):
        same(fake_quantize_rows(x, dtype, None), fake_quantize(x, dtype))
        for part, got in zip(x.split(128, 1), fake_quantize_rows(x, dtype, 128).split(128, 1), strict=True):
            same(got, fake_quantize(part, dtype))
    same(fake_quantize_weights(x, QUANTS["fp8"]), fake_quantize(x, FP8))
    blocks = fake_quantize_weights(x, QUANTS["fp8-block"])
    for place in ((slice(0, 128), slice(128)), (slice(128, 200), slice((inputs - 1) // 128 * 128, inputs))):
        alone = x[place]
        same(blocks[place], fake_quantize(alone.reshape(1, -1), FP8).view(alone.shape))
    integers = fake_quantize_weights(x, QUANTS["w8a8"])
    for part, got in zip(x.split(128, 1), integers.split(128, 1), strict=True):
        scale = (part.abs().amax(1, keepdim=True) / 127).half().float()
        same(got, (part / scale).round().clamp(-128, 127) * scale)


@pytest.mark.parametrize("name", FORMATS)
def test_linears_and_tables(name: str) -> None:
    ops, quant = fake_quantized_ops(QUANTS[name]), QUANTS[name]
    x, weight, bias = torch.randn(3, 300).bfloat16(), torch.randn(150, 300).bfloat16(), torch.randn(150)
    rows = fake_quantize_rows(
        x, torch.int8 if name == "w8a8" else FP8, None if name == "fp8" else 128
    ).double()
    wide = fake_quantize_weights(weight, quant).double()
    packed = ops.pack_linear(weight, bias.bfloat16())
    assert_near(ops.linear(packed, x), rows @ wide.T + bias.bfloat16().double())
    head = ops.logits(ops.pack_head(weight, None), x)
    exact = {"w8a8": x.double() @ wide.T, "fp8": rows @ wide.T, "fp8-block": x.double() @ weight.double().T}
    assert_near(head, exact[name])
    ids = torch.tensor([149, 3, 3])
    assert torch.equal(ops.embedding(ops.pack_embedding(weight, False), ids), weight[ids])
    tied = ops.embedding(ops.pack_embedding(weight, True), ids)
    assert torch.equal(
        tied, (weight if quant.keeps_head else fake_quantize_weights(weight, quant).bfloat16())[ids]
    )


def test_keys_and_values_in_e4m3() -> None:
    shape = KVShape(1, 3, 16, 2, 64, torch.int8, torch.bfloat16)
    cache = fake_quantized_ops(None, FP8).make_kv_cache(shape, CPU)
    REFERENCE.clear_blocks(cache, [0, 1])
    rows = torch.randn(2, 2, 64).bfloat16()
    cache.k.write(0, torch.tensor([1, 1]), torch.tensor([0, 1]), rows)
    REFERENCE.copy_blocks(cache, [(1, 2)])
    assert cache.k.numbers.dtype == FP8
    pages = cache.k.gather(0, torch.tensor([4, 5]), torch.float32)
    same(pages[:, :2].transpose(0, 1), fake_quantize(rows, FP8))
    assert not pages[:, 2:].any()
