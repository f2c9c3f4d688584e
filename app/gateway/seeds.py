"""Seeds of a request's choices."""

import secrets

_MASK = (1 << 64) - 1


def draw_seed() -> int:
    """Below 2^53, so that every JSON reader gives it back unchanged."""
    return secrets.randbits(53)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of an `n > 1` request, as a signed 64-bit integer.

    Choice 0 has the request's own seed, so that n = 1 is the same answer. The others are splitmix64's
    outputs: sending one of them as `seed` with n = 1 gives that choice again. The same for every prompt
    of a list.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - (1 << 64) if z >= 1 << 63 else z
