"""`engine.noise.uniform` for many rows at once, on the device."""

import torch
from torch import Tensor

from ..noise import MULTIPLIERS, ROUNDS, WEYL

_MASK = 0xFFFFFFFF


def uniform_rows(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """float64 [R]: bit by bit what `uniform` gives for int64 seeds and positions.

    Products of 32-bit words wrap around in int64; their low and high words are right all the same.
    """
    position_R = position_R.to(torch.int64)
    c0, c1 = position_R & _MASK, position_R >> 32 & _MASK
    c2 = c3 = torch.zeros_like(position_R)
    k0, k1 = seed_R & _MASK, seed_R >> 32 & _MASK
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (high >> 32 & _MASK) ^ c1 ^ k0,
            high & _MASK,
            (low >> 32 & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return ((c1 << 21) | (c0 >> 11)).double() * 2.0**-53
