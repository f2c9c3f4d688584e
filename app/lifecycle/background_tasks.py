"""Work that goes on without a connection, until it ends, is cancelled, or the daemon stops."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from .drain import Drain


@dataclass(slots=True)
class _Running:
    task: asyncio.Task[None]
    look: Callable[[], Any]


class Background:
    """By owner and id. Only to be used from the daemon's event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], _Running] = {}

    def start(self, place: tuple[str, str], work: Coroutine[Any, Any, None], look: Callable[[], Any]) -> None:
        """`look` tells how far it is. `work` keeps its own result, also when it is cancelled."""
        task = asyncio.create_task(work)
        self._running[place] = _Running(task, look)
        task.add_done_callback(lambda _: self._running.pop(place, None))

    def look(self, place: tuple[str, str]) -> Any | None:
        """None: nothing of that name runs."""
        found = self._running.get(place)
        return None if found is None else found.look()

    async def cancel(self, place: tuple[str, str]) -> None:
        """Returns when it has ended; at once where nothing of that name runs."""
        found = self._running.get(place)
        if found is not None:
            found.task.cancel()
            await asyncio.wait((found.task,))

    async def finish(self, drain: Drain, patience: float) -> None:
        """Waits for the drain; what runs may then go on for `patience` seconds, or until it is hurried."""
        await drain.begun.wait()
        hurry = asyncio.create_task(drain.hurried.wait())
        ended = asyncio.gather(*(each.task for each in self._running.values()), return_exceptions=True)
        await asyncio.wait((hurry, ended), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        await self.close()

    async def close(self) -> None:
        """Ends what runs."""
        tasks = [each.task for each in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
