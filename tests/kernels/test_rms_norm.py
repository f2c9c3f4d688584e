import pytest
import torch
from torch import Tensor

from llmbox.kernels.ops import Ops
from support.numbers import DTYPES, assert_near

EPS = 1e-6


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.double()
    return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 123), (33, 256)])
def test_over_hidden_states(ops: Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    assert_near(ops.rms_norm(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_over_heads_of_strided_rows(ops: Ops, dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 9, 16).to(dtype)[:, :6]
    weight = torch.randn(6, 16).to(dtype)
    assert_near(ops.rms_norm(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_float32(ops: Ops, dtype: torch.dtype) -> None:
    """1 + w of a small w has more bits than the model's dtype; the result has one rounding all the same."""
    x, weight = torch.randn(7, 123).to(dtype), 1 + torch.randn(123) / 100
    half_a_step = torch.finfo(dtype).eps / 2
    tolerance = {"atol": 0, "rtol": max(half_a_step, 1e-6) * 1.01}
    exact = exact_norm(x, weight)
    torch.testing.assert_close(ops.rms_norm(x, weight, EPS).double(), exact, **tolerance)
    residual = torch.zeros_like(x)
    torch.testing.assert_close(ops.add_rms_norm(x, residual, weight, EPS).double(), exact, **tolerance)
    heads, weights = torch.randn(5, 9, 16).to(dtype)[:, :6], 1 + torch.randn(6, 16) / 100
    got = ops.rms_norm(heads, weights, EPS).double()
    torch.testing.assert_close(got, exact_norm(heads, weights), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_grows_the_residual_in_place(ops: Ops, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((5, 48), (5, 48), (48,)))
    total = residual + x
    got = ops.add_rms_norm(x.clone(), residual, weight, EPS)
    assert torch.equal(residual, total)
    assert_near(got, exact_norm(total, weight))


def test_large_bfloat16_values_do_not_overflow(ops: Ops) -> None:
    x = torch.full((2, 32), 1e18, dtype=torch.bfloat16)
    assert_near(ops.rms_norm(x, torch.ones(32, dtype=torch.bfloat16), EPS), torch.ones(2, 32).double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_number_of_rows(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = torch.randn(33, 256).to(dtype), torch.randn(256).to(dtype)
    together = ops.rms_norm(x, weight, EPS)
    for row in range(33):
        assert torch.equal(ops.rms_norm(x[row : row + 1].clone(), weight, EPS), together[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 77])
def test_layer_norm(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) + 2 for shape in ((5, width), (5, width), (width,)))
    for before in (None, residual.clone()):
        y = (x if before is None else residual + x).double()
        exact = torch.nn.functional.layer_norm(y, (width,), weight.double(), None, 1e-5)
        assert_near(ops.layer_norm(x, before, weight, 1e-5), exact)
        assert before is None or torch.equal(before, residual + x)


def test_layer_norm_with_bias(ops: Ops) -> None:
    x, weight, bias = torch.randn(5, 77), torch.randn(77), torch.randn(77)
    exact = torch.nn.functional.layer_norm(x.double(), (77,), weight.double(), bias.double(), 1e-5)
    assert_near(ops.layer_norm(x, None, weight, 1e-5, bias), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale(ops: Ops, dtype: torch.dtype) -> None:
    x = torch.randn(5, 1100).to(dtype)[:, :1077]
    exact = (x.float() * 0.37).to(dtype)
    assert torch.equal(ops.scale(x, 0.37), exact)
    assert torch.equal(x, exact), "in place"
