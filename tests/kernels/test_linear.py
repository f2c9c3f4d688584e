import pytest
import torch

from llmbox.kernels.ops import Ops
from support.numbers import DTYPES, assert_near


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 96), (5, 123, 77), (33, 256, 512), (2, 1, 1)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_is_a_matrix_product(
    ops: Ops, dtype: torch.dtype, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    added = torch.randn(outputs).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (added.double() if bias else 0)
    got = ops.linear(ops.pack_linear(weight.clone(), added), x)
    assert got.dtype == dtype
    assert_near(got, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (256, 1030), (1024, 512), (3072, 160)])
def test_a_row_does_not_depend_on_the_number_of_rows(
    ops: Ops, dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    if not ops.row_invariant:
        pytest.skip("these kernels do not promise it")
    packed = ops.pack_linear((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), None)
    x = torch.randn(40, inputs).to(dtype)
    together = ops.linear(packed, x)
    for rows in range(1, 40):
        assert torch.equal(ops.linear(packed, x[:rows].clone()), together[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_takes_rows(ops: Ops, dtype: torch.dtype, tied: bool) -> None:
    weight = torch.randn(50, 24).to(dtype)
    table = ops.pack_embedding(weight.clone(), tied)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(ops.embedding(table, ids), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_times_a_scale(ops: Ops, dtype: torch.dtype, tied: bool) -> None:
    weight = torch.randn(50, 27).to(dtype)
    ids = torch.tensor([3, 49, 0, 3])
    table = ops.pack_embedding(weight.clone(), tied)
    assert torch.equal(ops.embedding(table, ids, 50.5), weight[ids] * 50.5)
    assert torch.equal(ops.embedding(table, ids), weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tied_embedding_is_also_the_head(ops: Ops, dtype: torch.dtype) -> None:
    weight, x = (torch.randn(50, 24) / 5).to(dtype), torch.randn(3, 24).to(dtype)
    table = ops.pack_embedding(weight.clone(), True)
    assert_near(ops.linear(table, x), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linears_of_heads_and_columns_side_by_side(ops: Ops, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 3 * 20).to(dtype)
    x_THI = rows[:, 6:].view(5, 3, 18)
    weights = [torch.randn(40, 18).to(dtype) / 18**0.5 for _ in range(3)]
    packed = ops.stack_heads([ops.pack_router(weight.clone(), None) for weight in weights])
    got = ops.linear_by_head(packed, x_THI)
    assert_near(got, torch.stack([x_THI[:, h].double() @ weights[h].double().T for h in range(3)], 1))
    assert torch.equal(ops.concat((got, x_THI)), torch.cat((got, x_THI), 2))
