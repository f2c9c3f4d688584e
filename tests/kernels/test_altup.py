"""Operations of Gemma 3n: C++ beside plain torch, whatever rows are computed together."""

import pytest
import torch
from torch import Tensor

from llmbox.kernels.op_types import AltUpOps
from llmbox.kernels.ops import Ops
from llmbox.kernels.reference.elementwise import ALTUP

STREAMS = 3


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def results(ops: AltUpOps, dtype: torch.dtype, width: int, rows: slice) -> list[Tensor]:
    """Results of all operations for these rows of 9."""
    streams, row = draw(9, STREAMS * width, dtype=dtype)[rows], draw(9, width, dtype=dtype)[rows]
    routed, gates = draw(9, STREAMS)[rows], draw(9, 2 * width, dtype=dtype)[rows].clone()
    predicted = ops.predict(streams, routed.contiguous(), draw(STREAMS**2, STREAMS)).clone()
    corrected = ops.correct(streams, row, 1, routed.contiguous(), draw(STREAMS, STREAMS)).clone()
    added, matched = streams.clone(), streams.clone()
    ops.add_to_others(added, row)
    ops.match_size(matched, streams[:, :width], 1e-5)
    sums = ops.gate_sums(gates[:, :width]).clone()
    ops.cut_gates(gates[:, :width], sums, width, 0.7)
    return [predicted, corrected, added, matched, sums, gates]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 77, 1300])
def test_operations_are_those_of_torch(ops: Ops, dtype: torch.dtype, width: int) -> None:
    if ops.altup is None:
        pytest.skip(f"{ops.name} has no operations of Gemma 3n")
    together = results(ops.altup, dtype, width, slice(0, 9))
    close = {"atol": 2e-5, "rtol": 2e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.02}
    for number, (ours, theirs) in enumerate(
        zip(together, results(ALTUP, dtype, width, slice(0, 9)), strict=True)
    ):
        torch.testing.assert_close(ours, theirs, **close, msg=lambda text, n=number: f"operation {n}: {text}")
    for row in range(9) if ops.row_invariant else ():
        alone = results(ops.altup, dtype, width, slice(row, row + 1))
        assert all(
            torch.equal(one, all_of[row : row + 1]) for one, all_of in zip(alone, together, strict=True)
        )


def test_few_gates_stay() -> None:
    gates = draw(2, 4000)
    ALTUP.cut_gates(gates, ALTUP.gate_sums(gates), 4000, 1.6449)
    assert (gates > 0).float().mean() == pytest.approx(0.05, abs=0.01)
