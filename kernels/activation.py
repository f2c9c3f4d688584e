"""Names of the gate activations. Torch-free, as reading config.json needs them."""

import math
from typing import Literal, NamedTuple

Activation = Literal[
    "silu",
    "gelu_tanh",
    "swiglu_oai",
    "relu2",
    "xielu",
    "gelu",
    "gelu_new",
    "relu",
    "relu2_gated",
    "gelu_gated",
]
"""x / (1 + e^-x), or x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. The third is gpt-oss's: with
g = min(gate, 7) and u between -7 and 7, activation(gate) * up is g / (1 + e^(-1.702 g)) * (u + 1). The
next are of MLPs without a gate: max(x, 0)^2, `XIELU`, x (1 + erf(x / sqrt(2))) / 2, the function of the
second, and max(x, 0). The last are max(x, 0)^2 and x (1 + erf(x / sqrt(2))) / 2 of gates."""
UNGATED: frozenset[Activation] = frozenset({"relu2", "xielu", "gelu", "gelu_new", "relu"})
CODES: dict[Activation, int] = {
    "silu": 0,
    "gelu_tanh": 1,
    "swiglu_oai": 2,
    "relu2": 3,
    "gelu": 4,
    "gelu_new": 5,
    "relu": 6,
    "relu2_gated": 7,
    "gelu_gated": 9,
}
"""Codes of kernels, as in cpu/native/elementwise.h. Experts have the first four, and `LimitedSwiGLU`."""
LIMITED_CODE = 8
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class LimitedSwiGLU(NamedTuple):
    """Gate of a layer whose numbers are limited (Step 3.5): min(silu(gate), limit) * u, with u between -limit
    and limit.
    """

    limit: float


class XIELU(NamedTuple):
    """xIELU of one layer, with its learned numbers. For x > 0 it is alpha_p x^2 + beta x, else
    alpha_n (e^min(x, eps) - 1 - x) + beta x.

    Huang and Schlag, "Deriving Activation Functions Using Integration", 2024.
    """

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


def code_of(activation: Activation | LimitedSwiGLU) -> tuple[int, float]:
    """Return the code that kernels have for an activation of gates, and its limit; infinite: none."""
    if isinstance(activation, LimitedSwiGLU):
        return LIMITED_CODE, activation.limit
    return CODES[activation], SWIGLU_LIMIT if activation == "swiglu_oai" else math.inf
