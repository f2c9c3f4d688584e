import torch.nn.functional as F
from torch import Tensor

from ..activation import Activation


def gate_mul(gate_up_T2F: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)
