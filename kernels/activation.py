"""Names of the gate activations. Torch-free, as reading config.json needs them."""

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""x / (1 + e^-x), or x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
