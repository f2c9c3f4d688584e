"""Counter-based random numbers: noise as a function of (seed, position) alone.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the
request's 64-bit seed, the counter is the position of the sampled token. There is no state, so a request that
is resumed, preempted or batched with others gets the same tokens, on any device.
"""

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox_4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return four random 32-bit words for a 128-bit counter and a 64-bit key, both in 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK_32, (low >> 32) ^ c3 ^ k1, low & _MASK_32
        k0, k1 = (k0 + WEYL[0]) & _MASK_32, (k1 + WEYL[1]) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """Return a multiple of 2^-53 in [0, 1). The seed is taken modulo 2^64: all signed 64-bit seeds differ."""
    counter = (position & _MASK_32, position >> 32 & _MASK_32, 0, 0)
    w0, w1, _, _ = philox_4x32(counter, (seed & _MASK_32, seed >> 32 & _MASK_32))
    return ((w1 << 32 | w0) >> 11) * 2.0**-53


_MASK = 0xFFFFFFFF


def uniform_rows(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return float64 [R], bit by bit the results of `uniform` for int64 seeds and positions.

    Products of 32-bit words wrap around in int64; their low and high words are still correct.
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
