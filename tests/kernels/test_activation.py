from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmbox.kernels.activation import XIELU, Activation, LimitedSwiGLU
from llmbox.kernels.ops import Ops
from support.numbers import DTYPES, assert_near

Gate = Activation | LimitedSwiGLU
LIMITED: list[Gate] = ["swiglu_oai", LimitedSwiGLU(3.0), LimitedSwiGLU(0.3)]
ACTIVATIONS: list[Gate] = ["silu", "gelu_tanh", *LIMITED, "relu2_gated", "gelu_gated"]


def exact(gate: Tensor, up: Tensor, activation: Gate) -> Tensor:
    if isinstance(activation, LimitedSwiGLU):
        limit = activation.limit
        return activated(gate, "silu").clamp(max=limit) * up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * (gate * 1.702).sigmoid() * (up + 1)
    return activated(gate, activation) * up


def activated(gate: Tensor, activation: Gate) -> Tensor:
    if activation == "silu":
        return gate / (1 + (-gate).exp())
    if activation == "relu2_gated":
        return gate.relu() ** 2
    if activation == "gelu_gated":
        return torch.nn.functional.gelu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 192), (5, 246), (33, 64)])
def test_gates(ops: Ops, dtype: torch.dtype, activation: Gate, shape: tuple[int, int]) -> None:
    x = (torch.randn(shape) * (4 if activation in LIMITED else 1)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert_near(ops.gate_mul(x, activation), exact(gate, up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_relu_without_ups(ops: Ops, dtype: torch.dtype) -> None:
    x = torch.randn(5, 123).to(dtype)
    x[2, 7] = torch.nan
    got = ops.gate_mul(x.clone(), "relu2")
    assert got[2, 7].isnan()
    assert_near(got[:2], x[:2].double().relu() ** 2)


UNGATED: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_new": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", UNGATED)
@pytest.mark.parametrize("shape", [(1, 1), (5, 123), (33, 2050)])
def test_activations_without_ups(
    ops: Ops, dtype: torch.dtype, activation: Activation, shape: tuple[int, int]
) -> None:
    x = (torch.randn(shape) * torch.logspace(-5, 1.2, shape[1])).to(dtype)
    got = ops.gate_mul(x.clone(), activation)
    assert_near(got, UNGATED[activation](x.double()))
    for row in range(shape[0]):
        assert torch.equal(ops.gate_mul(x[row : row + 1].clone(), activation), got[row : row + 1])
    x[0, 0] = torch.nan
    assert ops.gate_mul(x, activation)[0, 0].isnan()


@pytest.mark.parametrize("activation", UNGATED)
def test_far_from_zero_without_ups(ops: Ops, activation: Activation) -> None:
    x = torch.tensor([[-1e30, -90.0, -12.0, -4.0, -1e-20, 0.0, 1e-20, 4.0, 12.0, 90.0, 1e30]])
    assert_near(ops.gate_mul(x.clone(), activation), UNGATED[activation](x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 123), (33, 2050)])
def test_xielu(ops: Ops, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    numbers = XIELU(alpha_p=0.8, alpha_n=1.3, beta=0.5, eps=-1e-6)
    x = (torch.randn(shape) * torch.logspace(-5, 1.2, shape[1])).to(dtype)
    wide = x.double()
    negative = numbers.alpha_n * (wide.clamp(max=numbers.eps).expm1() - wide) + 0.5 * wide
    got = ops.gate_mul(x.clone(), numbers)
    assert_near(got, torch.where(wide > 0, numbers.alpha_p * wide**2 + 0.5 * wide, negative))
    for row in range(shape[0]):
        assert torch.equal(ops.gate_mul(x[row : row + 1].clone(), numbers), got[row : row + 1])
    x[0, 0] = torch.nan
    assert ops.gate_mul(x, numbers)[0, 0].isnan()


@pytest.mark.parametrize("activation", ACTIVATIONS[:5])  # a square of 1e30 is beyond float32
def test_far_from_zero(ops: Ops, activation: Gate) -> None:
    gate = torch.tensor([-1e30, -90.0, -12.0, -1e-20, 0.0, 1e-20, 12.0, 90.0, 1e30]).unsqueeze(0)
    got = ops.gate_mul(torch.cat((gate, torch.ones_like(gate)), 1), activation)
    assert_near(got, exact(gate.double(), torch.ones_like(gate).double(), activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_does_not_depend_on_the_number_of_rows(ops: Ops, activation: Gate) -> None:
    x = torch.randn(33, 246)
    together = ops.gate_mul(x.clone(), activation)
    for row in range(33):
        assert torch.equal(ops.gate_mul(x[row : row + 1].clone(), activation), together[row : row + 1])


@pytest.mark.parametrize("activation", LIMITED)
def test_limits_keep_nan(ops: Ops, activation: Gate) -> None:
    x = torch.randn(3, 200)
    x[0, 3], x[1, 104] = torch.nan, torch.nan
    got = ops.gate_mul(x, activation)
    assert got.isnan().nonzero().tolist() == [[0, 3], [1, 4]]
