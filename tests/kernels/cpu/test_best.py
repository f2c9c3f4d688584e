"""The most likely id, bit by bit what PyTorch finds."""

import math

import pytest
import torch

from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.ops import Ops
from support.kernel_backends import backends


@pytest.fixture(params=[name for name in backends() if name.startswith("cpu ")])
def ops(request: pytest.FixtureRequest) -> Ops:
    backend = load_backend(request.param)
    backend.use_threads([0, 1, 0])
    return backend.ops()


@pytest.mark.parametrize("width", [1, 3, 50, 8192, 8193, 20001])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_largest_and_its_lowest_id(ops: Ops, rows: int, width: int) -> None:
    assert ops.best_of is not None
    padded = torch.randn(rows, width + 7).round(decimals=1) + 100  # ties, and what lies beyond is larger
    padded[:, width:] = 1000
    got, ids = ops.best_of(padded[:, :width])
    expected = padded[:, :width].max(-1)
    assert torch.equal(got, expected.values)
    assert torch.equal(ids, (padded[:, :width] == got[:, None]).int().argmax(-1))


def test_strange_rows_are_those_of_torch(ops: Ops) -> None:
    assert ops.best_of is not None
    logits = torch.randn(6, 20000)
    logits[0, 15000] = math.nan
    logits[1, 3] = math.inf
    logits[2, ::2] = -math.inf
    logits[3] = -math.inf
    logits[4, -1] = math.nan
    logits[5, 0] = 1000
    best, ids = ops.best_of(logits)
    expected_best, expected_ids = torch.max(logits, dim=-1)
    assert torch.equal(best.nan_to_num(-7.5), expected_best.nan_to_num(-7.5))
    assert torch.equal(ids[[1, 2, 3, 5]], expected_ids[[1, 2, 3, 5]])
