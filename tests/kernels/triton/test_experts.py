"""Mixtures of experts on Triton's kernels, in the interpreter."""

import pytest
import torch

from llmbox.kernels.experts import Mixture
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.backend import triton_ops

CPU = torch.device("cpu")


def mixtures(count: int, chosen: int, hidden: int, inner: int) -> tuple[Mixture, Mixture]:
    """Of the reference, and stacked."""
    gate_ups = [torch.randn(2 * inner, hidden) / hidden**0.5 for _ in range(count)]
    downs = [torch.randn(hidden, inner) / inner**0.5 for _ in range(count)]
    ops = triton_ops(CPU, torch.float32)
    assert ops.stacks_experts
    linears = [[REFERENCE.pack_linear(weight, None) for weight in weights] for weights in (gate_ups, downs)]
    stacks = [[ops.pack_linear(torch.cat(weights), None)] for weights in (gate_ups, downs)]
    return Mixture(*linears, count, chosen, True), Mixture(*stacks, count, chosen, True)


@pytest.mark.parametrize(("rows", "count", "chosen"), [(1, 4, 1), (5, 8, 3), (40, 4, 2)])
def test_is_what_the_reference_gives(rows: int, count: int, chosen: int) -> None:
    plain, stacked = mixtures(count, chosen, 40, 24)
    x, logits = torch.randn(rows, 40), torch.randn(rows, count)
    got = triton_ops(CPU, torch.float32).experts(stacked, x, logits)
    torch.testing.assert_close(got, REFERENCE.experts(plain, x, logits), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Whatever the tiles: 60 rows for each expert would take another than 2."""
    _, stacked = mixtures(2, 1, 40, 24)
    stacked = Mixture(
        *(
            [type(linear)(linear.weight_OI.half(), None) for linear in each]
            for each in (stacked.gate_ups, stacked.downs)
        ),
        2,
        1,
        True,
    )
    ops = triton_ops(CPU, torch.float16, deterministic=True)
    x, logits = torch.randn(70, 40).half(), torch.randn(70, 2)
    together = ops.experts(stacked, x, logits)
    for rows in (1, 3):
        assert torch.equal(ops.experts(stacked, x[-rows:].clone(), logits[-rows:].clone()), together[-rows:])
