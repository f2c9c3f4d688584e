"""Names of the gate activations. Torch-free, as reading config.json needs them."""

from typing import Literal

Activation = Literal["silu", "gelu_tanh", "swiglu_oai", "relu2"]
"""x / (1 + e^-x), or x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. The third is gpt-oss's: with
g = min(gate, 7) and u between -7 and 7, activation(gate) * up is g / (1 + e^(-1.702 g)) * (u + 1). The
last is max(x, 0)^2, of an MLP without a gate."""
UNGATED: frozenset[Activation] = frozenset({"relu2"})
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
