"""Threads for work whose time grows with its input, so that the event loop stays responsive; fair turns."""

import asyncio
import contextlib
import heapq
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Final, TypeVar

T = TypeVar("T")

SMALL = 2000
"""Characters or tokens that are processed on the loop: about the time that a thread switch takes."""


_SIZE_PER_TURN, _MOST_TURNS = 8192, 64
"""Characters for which a job lets one that comes a turn later go first, and the most that may overtake it."""
TENANT: Final = ContextVar("tenant", default="")
"""Tenant of the request that this task works for (`Identity.tenant`); empty for the daemon itself."""


class FairSlots:
    """Semaphore with fair shares: a free slot goes to the waiting caller that holds the fewest; of several,
    to the one that was served the longest ago. A caller's short jobs go before its long ones, which age.
    Belongs to one event loop.
    """

    def __init__(self, size: int, most_per_caller: int) -> None:
        """`most_per_caller`: slots that one caller may hold, also while others are free."""
        self._free, self._most = size, most_per_caller
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, list[tuple[int, int, asyncio.Future[None]]]] = {}
        """Heaps of jobs by caller: when each is due in turns, and its number."""
        self._jobs = 0
        self._turns = 0
        self._last_turn: dict[str, int] = {}
        """Number of the last turn of each caller that holds a slot or waits."""

    @contextlib.asynccontextmanager
    async def hold(self, size: int = 0) -> AsyncIterator[None]:
        """Hold a slot for a job of so many characters."""
        caller = await self.acquire(size)
        try:
            yield
        finally:
            self.release(caller)

    def has_room(self, most: int) -> bool:
        """Return whether `TENANT` may wait: not where `most` do, unless it has less than its share."""
        if sum(map(len, self._waiting.values())) < most:
            return True
        return len(self._waiting.get(TENANT.get(), ())) * len(self._waiting) < most

    async def acquire(self, size: int = 0) -> str:
        """Take a slot for a job of `TENANT`, which is returned for `release`."""
        caller = TENANT.get()
        turn = asyncio.get_running_loop().create_future()
        self._jobs += 1
        job = (self._turns + min(size // _SIZE_PER_TURN, _MOST_TURNS), self._jobs, turn)
        heapq.heappush(self._waiting.setdefault(caller, []), job)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(caller, job)
            else:
                self.release(caller)
            raise
        return caller

    def release(self, caller: str) -> None:
        self._held[caller] -= 1
        self._free += 1
        self._forget(caller)
        self._serve()

    def _leave(self, caller: str, job: tuple[int, int, "asyncio.Future[None]"]) -> None:
        jobs = self._waiting.get(caller, [])
        if job in jobs:
            jobs.remove(job)
            heapq.heapify(jobs)
            self._forget(caller)

    def _forget(self, caller: str) -> None:
        """Forget what a caller no longer has."""
        if not self._waiting.get(caller):
            self._waiting.pop(caller, None)
            if not self._held[caller]:
                self._held.pop(caller, None)
                self._last_turn.pop(caller, None)

    def _serve(self) -> None:
        """Give free slots to callers that wait."""
        while self._free and self._waiting:
            caller = min(self._waiting, key=self._rank)
            if self._held[caller] >= self._most:
                return
            *_, turn = heapq.heappop(self._waiting[caller])
            if not turn.done():  # else its task was cancelled, and has not run since
                self._free -= 1
                self._held[caller] += 1
                self._turns += 1
                self._last_turn[caller] = self._turns
                turn.set_result(None)
            self._forget(caller)

    def _rank(self, caller: str) -> tuple[int, int]:
        return self._held[caller], self._last_turn.get(caller, 0)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` over `size` characters or tokens, in a thread if that is large."""
    return work() if size <= SMALL else await asyncio.to_thread(work)


def in_thread(work: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """Run `work` in a daemon thread. Executors' threads would delay the exit; a download can be cut off at
    any byte.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(settle: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - handed over
            failure = error
            deliver(lambda: future.set_exception(failure))
        else:
            deliver(lambda: future.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
