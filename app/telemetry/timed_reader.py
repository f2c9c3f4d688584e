"""Reads with a time-out, in threads of their own: the event loop never waits, and stuck calls never
pile up.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_Job = tuple[Callable[[], T], "asyncio.Future[T]", asyncio.AbstractEventLoop]


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Result of a read that has not returned for `seconds`."""

    seconds: float


class TimedReader(Generic[T]):
    """Runs reads in one thread of its own, which never keeps the process alive."""

    def __init__(self, name: str, timeout: float) -> None:
        self._name = name
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[_Job[T]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: asyncio.Future[T] | None = None
        self._begun = 0.0

    async def read(self, call: Callable[[], T]) -> T | TimedOut:
        """Run `call`. Returns its result, or `TimedOut` after the time-out; while a call is stuck, returns so
        at once.

        Raises what `call` raises. The late result of a stuck call is discarded.
        """
        if self._pending is None or self._pending.done():
            self._start(call)
            assert self._pending is not None
            await asyncio.wait({self._pending}, timeout=self._timeout)
            if self._pending.done():
                return self._pending.result()
        return TimedOut(time.monotonic() - self._begun)

    def _start(self, call: Callable[[], T]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        self._pending = loop.create_future()
        self._pending.add_done_callback(_retrieve)
        self._begun = time.monotonic()
        self._jobs.put((call, self._pending, loop))

    def _run(self) -> None:
        while True:
            call, future, loop = self._jobs.get()
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - handed to the waiting caller
                _deliver(loop, future, error)
            else:
                _deliver(loop, future, result)


def _deliver(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[T]", outcome: T | Exception) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, outcome)
    except RuntimeError:  # the loop is closed: the daemon ended while we hung
        return


def _settle(future: "asyncio.Future[T]", outcome: T | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _retrieve(future: "asyncio.Future[T]") -> None:
    if not future.cancelled():
        future.exception()
