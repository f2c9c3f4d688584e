"""Keeps the event loop turning: work whose time grows with its input goes to a thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SMALL = 2000
"""Characters or tokens that are handled on the loop: about the time that a thread switch takes."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`work` over `size` characters or tokens."""
    return work() if size <= SMALL else await asyncio.to_thread(work)
