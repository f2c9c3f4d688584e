"""Padded head width of the C++ kernels' KV cache; mirrors `KVCache` in native/kv_cache.h. Torch-free."""

from typing import Final

STRIP: Final = 16
TILE: Final = 32
"""Numbers of bfloat16 in a row of an AMX tile."""


def kv_width(head_dim: int, dtype: str, level: str) -> int:
    """Return the stored numbers for `head_dim`; `level` is the name of one of `LEVELS`."""
    step = TILE if (dtype, level) == ("bfloat16", "amx") else STRIP
    return -(-head_dim // step) * step
