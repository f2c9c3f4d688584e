"""Rows of 8 bits that attention leaves are those that a pass of their own would make."""

from typing import Any

import pytest
import torch

from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.triton.attention import attention_metadata as attention_plan
from llmbox.kernels.triton.attention.attention import attend_rows
from llmbox.kernels.triton.attention.attention_combine import fits_heads
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.linear import linear
from llmbox.kernels.triton.linear.linear import FP8_BLOCKS, FP8_ROWS, Fp8Linear
from llmbox.kernels.triton.linear.quantize_activations import RowFormat, Rows8, quantize_rows
from support.paged import CPU, PagedStep

INT8 = RowFormat(torch.int8, 128)
GIVEN = FP8_ROWS._replace(given=torch.tensor([0.004]))
MIXED = [(70, 1), (0, 1), (5, 1), (0, 6)]


def attend(step: PagedStep, row_format: RowFormat, **options: Any) -> tuple[torch.Tensor, Rows8 | None]:
    ops = triton_ops(CPU, step.dtype, **options)
    cache = ops.make_kv_cache(step.shape(), CPU)
    spans = [(past, past + new) for past, new in step.sequences]
    step.write(ops, cache, [(0, end) for _, end in spans], 1)
    plan = ops.plan_attention(step.ragged(spans), cache, None)
    return attend_rows(torch.cat(step.q), cache, 1, plan, step.head_dim**-0.5, row_format)


def same_bits(got: Rows8, expected: Rows8) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("row_format", "head_dim", "dtype", "options"),
    [
        (INT8, 128, torch.float32, {}),
        (FP8_BLOCKS, 128, torch.float16, {"deterministic": True}),
        (FP8_BLOCKS, 256, torch.float32, {}),
        (GIVEN, 80, torch.float16, {}),
        (GIVEN, 64, torch.float32, {"deterministic": True}),
    ],
)
def test_of_decoding_and_prompts(
    monkeypatch: pytest.MonkeyPatch,
    row_format: RowFormat,
    head_dim: int,
    dtype: torch.dtype,
    options: dict[str, bool],
) -> None:
    """Contexts in pieces and whole."""
    monkeypatch.setattr(attention_plan, "LEAST_SPLIT", 32)
    monkeypatch.setattr(attention_plan, "FIXED_SPLIT", 32)
    for sequences in (MIXED, [(20, 1), (3, 2)]):
        out, eight = attend(
            PagedStep(sequences, heads=(4, 2), head_dim=head_dim, dtype=dtype), row_format, **options
        )
        assert eight is not None
        same_bits(eight, quantize_rows(out, row_format))


@pytest.mark.parametrize("row_format", [INT8, FP8_BLOCKS, GIVEN])
def test_what_is_not_finite_stays_so(row_format: RowFormat) -> None:
    step = PagedStep([(3, 1), (0, 2)], heads=(2, 1), head_dim=128)
    step.v[1][0, 0, 5] = torch.inf
    out, eight = attend(step, row_format)
    assert eight is not None
    assert out.isfinite().all(1).tolist() == [True, False, False]
    shared = eight.scales.repeat_interleave(256 // eight.scales.shape[1], 1)
    assert (eight.numbers.float() * shared).isnan().any(1).tolist() == [False, True, True]


def test_a_scale_for_a_whole_row_is_left_to_a_pass_of_its_own() -> None:
    assert not fits_heads(FP8_ROWS, 128)
    assert not fits_heads(INT8, 64)
    assert not fits_heads(INT8, 384), "no power of two"
    assert attend(PagedStep([(3, 1)], head_dim=64), INT8)[1] is None
    assert attend(PagedStep([(3, 1)], head_dim=128), FP8_ROWS)[1] is None


def test_the_linear_that_reads_them_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer with its own scale; rows for another linear are not taken."""
    step = PagedStep([(3, 1), (0, 2)], heads=(2, 1), head_dim=64)
    ops = triton_ops(CPU, torch.float32, QUANTS["fp8-static"])
    weights = torch.randn(16, 128).to(torch.float8_e4m3fn)
    scales = torch.ones(16, 1)
    outputs = [Fp8Linear(weights, scales, None, torch.tensor([scale])) for scale in (0.01, 0.03)]
    rounded: list[int] = []
    monkeypatch.setattr(linear, "quantize_rows", lambda *args: rounded.append(0) or quantize_rows(*args))
    together = [
        ops.linear(packed, step.attend(ops.before(packed), layer=layer))
        for layer, packed in enumerate(outputs)
    ]
    assert rounded == []
    apart = [ops.linear(packed, step.attend(ops, layer=layer)) for layer, packed in enumerate(outputs)]
    assert len(rounded) == 2
    assert all(map(torch.equal, together, apart))
    assert not torch.equal(*apart)
    assert torch.equal(ops.linear(outputs[1], step.attend(ops.before(outputs[0]), layer=1)), apart[1])
    assert len(rounded) == 3
