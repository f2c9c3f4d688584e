"""What the sums of `pooling.py` mean. Apart from it, for those who do without torch."""

import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

UNIT: Final = 2.0**-30


def add_up(sums: list[int], more: Iterable[int]) -> None:
    """`more` into `sums`, which may be empty yet."""
    sums[:] = map(operator.add, sums, more) if sums else more


def as_vector(sums: Sequence[int], rows: int) -> bytes:
    """Their mean over so many rows, as little-endian float32."""
    vector = array("f", (units * UNIT / rows for units in sums))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()
