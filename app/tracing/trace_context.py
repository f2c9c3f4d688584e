"""W3C trace context of a request: the `traceparent` header, checked strictly.

https://www.w3.org/TR/trace-context/ - a header that is not exactly as it says is ignored, never repaired.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_HEADER: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?",
    re.DOTALL | re.ASCII,
)
_SAMPLED: Final = 1
MOST_BYTES: Final = 512
"""Longest header that is looked at; those of the only version so far have 55."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Place of one request in a trace. Ids are lower-case hexadecimal."""

    trace_id: str
    span_id: str
    """Id of the request's own span."""
    parent_id: str = ""
    """Span of the caller; empty: the request begins its trace."""
    is_sampled: bool = False
    """Its spans are exported."""
    address: str = ""
    """Address that the request came to."""
    port: int | None = None


def parse_traceparent(values: Sequence[str]) -> tuple[str, str, bool] | None:
    """Parse the values of all `traceparent` headers. Returns (trace id, parent span id, whether the caller
    samples); None if there is not exactly one, or it is not valid.
    """
    if len(values) != 1 or len(values[0]) > MOST_BYTES:
        return None
    match = _HEADER.fullmatch(values[0])
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"] is not None):
        return None
    if not int(match["trace"], 16) or not int(match["parent"], 16):
        return None
    return match["trace"], match["parent"], bool(int(match["flags"], 16) & _SAMPLED)


def draw_span_id() -> str:
    return _draw(8)


def draw_trace_id() -> str:
    return _draw(16)


def _draw(size: int) -> str:
    """Draw a random id of `size` bytes that is not zero, which stands for none."""
    return f"{1 + secrets.randbelow((1 << 8 * size) - 1):0{2 * size}x}"
