"""Messages between daemon and engine, their codec, and both ends of the connection."""

from typing import Final

MAX_FRAME: Final = 64 << 20
"""Bytes of the longest message: room for log-probabilities (20 alternatives) of a prompt of 128k tokens. A
request of a million tokens is 5 MB.
"""
