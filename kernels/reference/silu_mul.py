import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
