import pytest
import torch

from llmbox.kernels.ops import Ops
from support.numbers import DTYPES, assert_near


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 192), (5, 246), (33, 64)])
def test_gates(ops: Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert_near(ops.silu_mul(x), gate / (1 + (-gate).exp()) * up)


def test_a_row_does_not_depend_on_the_number_of_rows(ops: Ops) -> None:
    x = torch.randn(33, 246)
    together = ops.silu_mul(x.clone())
    for row in range(33):
        assert torch.equal(ops.silu_mul(x[row : row + 1].clone()), together[row : row + 1])
