"""Philox-4x32-10 for one counter, in Python integers."""

_MASK_32 = 0xFFFFFFFF


def philox_4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a 128-bit counter and a 64-bit key, both in 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _MASK_32, (low >> 32) ^ c3 ^ k1, low & _MASK_32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK_32, (k1 + 0xBB67AE85) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A multiple of 2^-53 in [0, 1). The seed is taken modulo 2^64: all signed 64-bit seeds differ."""
    counter = (position & _MASK_32, position >> 32 & _MASK_32, 0, 0)
    w0, w1, _, _ = philox_4x32(counter, (seed & _MASK_32, seed >> 32 & _MASK_32))
    return ((w1 << 32 | w0) >> 11) * 2.0**-53
