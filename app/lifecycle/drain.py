"""Drain at the end of serving, and the background tasks that it waits for."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ..errors import ApiError, unavailable


class Drain:
    """Drain state, shared by signal handlers (`begin`), the server (waits) and responses (poll).

    `draining`: no new work, open work may finish. `expired`: open work ends now, with an error object.
    """

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.hurried = asyncio.Event()
        self.expired = False
        self._endless: set[Callable[[], None]] = set()

    @property
    def draining(self) -> bool:
        return self.begun.is_set()

    def begin(self) -> None:
        """Start the drain. A second call expires it in under a second."""
        if self.draining:
            self.hurried.set()
            return
        self.begun.set()
        for end in list(self._endless):
            end()

    def register_endless(self, end: Callable[[], None]) -> None:
        """Register a stream that never finishes by itself. `end` is called when the drain begins."""
        self._endless.add(end)

    def unregister_endless(self, end: Callable[[], None]) -> None:
        self._endless.discard(end)


def shutting_down() -> ApiError:
    """Error 503 that ends open work when the drain expires."""
    return unavailable("llmbox is shutting down.", "shutting_down", retry_after=5)


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    look: Callable[[], Any]
    begun: asyncio.Event


class BackgroundTasks:
    """Background tasks by owner and id. Use it only from the daemon's event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], _Running] = {}

    def start(self, place: tuple[str, str], work: Coroutine[Any, Any, None], look: Callable[[], Any]) -> None:
        """Start a task. `look` reports its progress. `work` stores its own result, also when it is
        cancelled.
        """

        async def run() -> None:
            running.begun.set()
            await work

        running = self._running[place] = _Running(asyncio.create_task(run()), look, asyncio.Event())
        running.task.add_done_callback(lambda _: self._forget(place, running))

    def look(self, place: tuple[str, str]) -> Any | None:
        """Progress of a task; None if no such task runs."""
        found = self._running.get(place)
        return None if found is None else found.look()

    async def cancel(self, place: tuple[str, str]) -> None:
        """Cancel a task and return when it has ended; at once if no such task runs."""
        found = self._running.get(place)
        if found is not None:
            await found.begun.wait()  # cancelled before its first step, `work` would not run at all
            found.task.cancel()
            await asyncio.wait((found.task,))

    async def finish(self, drain: Drain, patience: float) -> None:
        """Wait for the drain. Running tasks may then continue for `patience` seconds, or until the drain
        expires.
        """
        await drain.begun.wait()
        hurry = asyncio.create_task(drain.hurried.wait())
        ended = asyncio.gather(*(each.task for each in self._running.values()), return_exceptions=True)
        await asyncio.wait((hurry, ended), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        await self.close()

    async def close(self) -> None:
        """Cancel all running tasks."""
        await asyncio.gather(*(self.cancel(place) for place in self._running))

    def _forget(self, place: tuple[str, str], ended: _Running) -> None:
        """Forget a task, unless another one has its place already."""
        if self._running.get(place) is ended:
            del self._running[place]
