"""Mixtures of experts on Triton's kernels, in the interpreter, in every format of weights."""

import pytest
import torch
from torch import Tensor

from llmbox.kernels.op_types import Mixture, Routing
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.linear import fused_moe as gemm_experts
from llmbox.kernels.triton.linear.fused_moe import experts_product, outputs_of
from llmbox.kernels.triton.linear.linear import dequantize
from support.formats import plain_torch

CPU = torch.device("cpu")
HIDDEN, INNER = 128, 64
"""An expert's gates and ups, and its downs, are whole blocks of scales, as they are apart. Half a group of
inner rows."""
MADE_HERE = [None, *(quant for quant in QUANTS.values() if not quant.in_checkpoints_only)]


def weights_of(count: int, hidden: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of gates and ups, and of downs: [X, 2 F, E], [X, E, F]."""
    gate_ups = torch.randn(count, 2 * inner, hidden) / hidden**0.5
    return gate_ups.to(dtype), (torch.randn(count, hidden, inner) / inner**0.5).to(dtype)


def apart(ops: Ops, weights: tuple[Tensor, Tensor], chosen: int) -> Mixture:
    linears = [[ops.pack_linear(weight_OI, None) for weight_OI in each] for each in weights]
    return Mixture(*linears, len(weights[0]), chosen, True)


def stacked(ops: Ops, weights: tuple[Tensor, Tensor], chosen: int) -> Mixture:
    assert ops.pack_experts is not None
    linears = [[ops.pack_experts(each.flatten(0, 1), None)] for each in weights]
    return Mixture(*linears, len(weights[0]), chosen, True)


@pytest.mark.parametrize(("rows", "count", "chosen"), [(1, 4, 1), (5, 8, 3), (40, 4, 2)])
def test_is_what_the_reference_gives(rows: int, count: int, chosen: int) -> None:
    ours, theirs = triton_ops(CPU, torch.float32), plain_torch(None)
    weights = weights_of(count, 40, 24, torch.float32)
    x, logits = torch.randn(rows, 40), torch.randn(rows, count)
    want = theirs.experts(apart(theirs, weights, chosen), x, logits)
    got = ours.experts(stacked(ours, weights, chosen), x, logits)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_biases_activation_and_a_shared_expert() -> None:
    ours, theirs = triton_ops(CPU, torch.float32), plain_torch(None)
    weights, biases = weights_of(4, 40, 24, torch.float32), (torch.randn(4, 48), torch.randn(4, 40))
    both = list(zip(weights, biases, strict=True))
    apart = [[theirs.pack_linear(w, b) for w, b in zip(*each, strict=True)] for each in both]
    stacked = [[ours.pack_experts(w.flatten(0, 1), b.flatten())] for w, b in both]
    rule = 4, 2, True, Routing(scoring="sigmoid"), "swiglu_oai"
    rows = torch.randn(7, 40), torch.randn(7, 4), torch.randn(7, 40), torch.randn(7, 1)
    want = theirs.experts(Mixture(*apart, *rule), *rows)
    torch.testing.assert_close(ours.experts(Mixture(*stacked, *rule), *rows), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("quant", MADE_HERE[1:], ids=lambda quant: quant.name)
@pytest.mark.parametrize("rows", [2, 20])
def test_rounded_experts_are_what_plain_torch_gives(quant: Quant, rows: int) -> None:
    ours, theirs = triton_ops(CPU, torch.float32, quant), plain_torch(quant)
    weights = weights_of(3, HIDDEN, INNER, torch.float32)
    x, logits = torch.randn(rows, HIDDEN), torch.randn(rows, 3)
    want = theirs.experts(apart(theirs, weights, 2), x, logits)
    got = ours.experts(stacked(ours, weights, 2), x, logits)
    # Sums in another order may be rounded to another code before the second product.
    torch.testing.assert_close(got, want, atol=2e-2 if not quant.on_cpu else 1e-5, rtol=0)


@pytest.mark.parametrize("quant", MADE_HERE, ids=lambda quant: quant.name if quant else "wide")
def test_one_expert_of_a_stack_is_its_linear(quant: Quant | None) -> None:
    """Few rows and many, inputs that are no whole groups, and an expert that nobody chose."""
    ops = triton_ops(CPU, torch.float16, quant, deterministic=True)
    weights = torch.randn(3, 128, 160).half() / 160**0.5
    assert ops.pack_experts is not None
    packed = ops.pack_experts(weights.flatten(0, 1), None)
    assert outputs_of(packed) == 3 * 128
    x = torch.randn(73, 160).half()
    starts = torch.tensor([0, 70, 70, 73], dtype=torch.int32)
    got = experts_product(x, packed, starts)
    for expert, rows in ((0, slice(0, 70)), (2, slice(70, 73))):
        want = ops.linear(ops.pack_linear(weights[expert], None), x[rows].clone())
        torch.testing.assert_close(got[rows], want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("quant", MADE_HERE, ids=lambda quant: quant.name if quant else "wide")
def test_a_row_does_not_depend_on_the_others(quant: Quant | None) -> None:
    """Whatever the tiles: 20 rows for each expert would take another than 2."""
    ops = triton_ops(CPU, torch.float16, quant, deterministic=True)
    mixture = stacked(ops, weights_of(2, 40, 24, torch.float16), 1)
    x, logits = torch.randn(40, 40).half(), torch.randn(40, 2)
    together = ops.experts(mixture, x, logits)
    for rows in (1, 3):
        assert torch.equal(ops.experts(mixture, x[-rows:].clone(), logits[-rows:].clone()), together[-rows:])


@pytest.mark.parametrize("quant", MADE_HERE, ids=lambda quant: quant.name if quant else "wide")
def test_some_experts_give_what_they_give_among_all(quant: Quant | None) -> None:
    """Rows that chose others get zeros, whatever memory holds. With biases."""
    ops = triton_ops(CPU, torch.float16, quant, deterministic=True)
    assert ops.pack_experts is not None
    weights = weights_of(4, HIDDEN, INNER, torch.float16)
    biases = torch.randn(4, 2 * INNER).half(), torch.randn(4, HIDDEN).half()
    both = list(zip(weights, biases, strict=True))
    x, logits = torch.randn(23, HIDDEN).half(), torch.randn(23, 4)
    logits[:3, 0] += 9
    all_here = Mixture(*([ops.pack_experts(w.flatten(0, 1), b.flatten())] for w, b in both), 4, 1, True)
    part = [[ops.pack_experts(w[1:3].flatten(0, 1), b[1:3].flatten())] for w, b in both]
    got = ops.experts(Mixture(*part, 4, 1, True, held=range(1, 3)), x, logits)
    is_here = ((logits.argmax(1) == 1) | (logits.argmax(1) == 2)).unsqueeze(1)
    assert 0 < is_here.sum() < 23
    assert torch.equal(got, ops.experts(all_here, x, logits).masked_fill(~is_here, 0.0))
    assert not ops.experts(Mixture(*part, 4, 1, True, held=range(1, 3)), x[:3], logits[:3]).any()


def test_nothing_is_asked_of_torch_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack is as tall as hundreds of linears: what tries products of it would take their memory."""
    from llmbox.kernels.triton.linear import scaled_mm_choice as choice

    monkeypatch.setattr(choice, "why_not", lambda *_: pytest.fail("asked"))
    for name in ("fp8", "fp8-block"):
        ops = triton_ops(CPU, torch.bfloat16, QUANTS[name])
        assert ops.pack_experts is not None
        assert ops.pack_experts(torch.zeros(256, 512, dtype=torch.bfloat16), None).by_torch is None


@pytest.mark.parametrize("name", ["int8", "int8-g32", "int4", "int4-g128"])
def test_weights_of_many_rows_are_scaled_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(gemm_experts, "MANY", 19)
    ops = triton_ops(CPU, torch.float16, QUANTS[name])
    assert ops.pack_experts is not None
    packed = ops.pack_experts(torch.randn(2 * 64, 160).half() / 160**0.5, None)
    x, starts = torch.randn(40, 160).half(), torch.tensor([0, 25, 40], dtype=torch.int32)
    first, second = dequantize(packed.weight, torch.float32).chunk(2)
    want = torch.cat((x[:25].float() @ first.T, x[25:].float() @ second.T))
    torch.testing.assert_close(experts_product(x, packed, starts).float(), want, atol=4e-3, rtol=4e-3)
