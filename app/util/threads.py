"""Threads for work whose time grows with its input, so that the event loop stays responsive."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SMALL = 2000
"""Characters or tokens that are processed on the loop: about the time that a thread switch takes."""


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
