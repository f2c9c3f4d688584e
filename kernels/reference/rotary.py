import torch
from torch import Tensor


def rotary(x_TnD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate in float32: bfloat16 angles would blur positions that are far apart.

    Su et al., "RoFormer", 2021; halves layout of GPT-NeoX and Hugging Face checkpoints.
    """
    half = x_TnD.shape[-1] // 2
    y = x_TnD.float()
    swapped = torch.cat((y[..., half:], y[..., :half]), -1)
    return (y * cos_TD.unsqueeze(1)).addcmul_(swapped, sin_TD.unsqueeze(1)).to(x_TnD.dtype)
