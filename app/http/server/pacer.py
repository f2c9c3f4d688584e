"""Request pacing: start a few requests in each turn of the event loop, so that a burst does not stall the
rest.

A request takes about a millisecond until it waits for something. Thousands that arrive together would be one
turn of seconds, in which no stream gets a token and `/health` no answer.
"""

import asyncio
from collections import deque
from typing import Final

PER_TURN: Final = 2


class RequestPacer:
    """First come, first served. Requests do not wait while there are at most `PER_TURN` a turn."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._started = 0
        """Number of requests started in this turn of the loop; 0: none since the last one."""

    async def turn(self) -> None:
        """Wait until this request may start."""
        if self._started < PER_TURN and not self._waiting:
            self._count()
            return
        start = asyncio.get_running_loop().create_future()
        self._waiting.append(start)
        await start

    def _count(self) -> None:
        if self._started == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._started += 1

    def _next_turn(self) -> None:
        self._started = 0
        while self._waiting and self._started < PER_TURN:
            start = self._waiting.popleft()
            if not start.done():  # its client has not left
                self._count()
                start.set_result(None)
