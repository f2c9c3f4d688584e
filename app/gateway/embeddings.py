"""Embedding vectors for clients: truncated to the requested dimensions and normalized to length 1."""

import base64
import math
import sys
from array import array


def unit_vector(pooled: bytes, dimensions: int | None) -> "array[float]":
    """Truncate and normalize a vector. `pooled`: little-endian float32 of any length. A vector of zeros stays
    zero.
    """
    numbers = array("f", pooled)
    if sys.byteorder == "big":
        numbers.byteswap()
    numbers = numbers[:dimensions]
    length = math.hypot(*numbers)
    return array("f", [number / length for number in numbers]) if length else numbers


def as_base64(vector: "array[float]") -> str:
    """Encode as base64 of little-endian float32, as OpenAI's library reads it."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector).decode()
