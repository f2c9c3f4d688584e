import math

import pytest
import torch

from llmbox.kernels.ops import Ops
from support.numbers import DTYPES, assert_near


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 4, 16), (7, 3, 10), (40, 6, 128)])
def test_turns_pairs_of_halves(ops: Ops, dtype: torch.dtype, rows: int, heads: int, head_dim: int) -> None:
    x = torch.randn(rows, heads + 2, head_dim).to(dtype)[:, :heads]
    angle = torch.randn(rows, head_dim // 2).double() * math.pi
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    exact = torch.cat((pairs.real, pairs.imag), -1)
    cos, sin = angle.cos().float(), angle.sin().float()
    got = ops.rotary(x, torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1))
    assert got.dtype == dtype
    assert_near(got, exact)
