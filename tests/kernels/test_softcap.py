import pytest
import torch

from llmbox.kernels.ops import Ops
from support.numbers import assert_near


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_keeps_numbers_within_the_cap(ops: Ops, cap: float) -> None:
    x = torch.randn(5, 3000) * torch.logspace(-6, 6, 3000) * cap
    assert_near(ops.softcap(x.clone(), cap), cap * (x.double() / cap).tanh())


def test_small_numbers_keep_their_bits(ops: Ops) -> None:
    x = torch.randn(2, 100) * 1e-3
    exact = 30 * (x.double() / 30).tanh()
    torch.testing.assert_close(ops.softcap(x.clone(), 30.0).double(), exact, atol=0, rtol=1e-6)


def test_a_row_does_not_depend_on_the_number_of_rows(ops: Ops) -> None:
    if not ops.row_invariant:
        pytest.skip("these kernels do not promise it")
    x = torch.randn(5, 1030) * 40
    together = ops.softcap(x.clone(), 30.0)
    for row in range(5):
        assert torch.equal(ops.softcap(x[row : row + 1].clone(), 30.0), together[row : row + 1])


def test_nan_stays(ops: Ops) -> None:
    x = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf]])
    got = ops.softcap(x, 30.0)[0]
    assert got[1].isnan()
    assert got[2:].tolist() == [30.0, -30.0]
