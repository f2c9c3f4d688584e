import torch.nn.functional as F
from torch import Tensor

from .linear import Linear


def pack_embedding(weight_VE: Tensor, tied: bool) -> Linear:  # noqa: ARG001 - one layout serves both uses
    return Linear(weight_VE, None)


def embedding(table: Linear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
    rows_TE = F.embedding(ids_T, table.weight_OI)
    return rows_TE if scale == 1.0 else rows_TE.mul_(scale)
