"""How wide the C++ kernels keep keys and values of a head, as `KVCache` in native/kv_cache.h. No torch."""

from typing import Final

STRIP: Final = 16
TILE: Final = 32
"""Numbers of bfloat16 in a row of an AMX tile."""


def kv_width(head_dim: int, dtype: str, level: str) -> int:
    """Numbers that are kept for `head_dim`; `level`: the name of one of `LEVELS`."""
    step = TILE if (dtype, level) == ("bfloat16", "amx") else STRIP
    return -(-head_dim // step) * step
