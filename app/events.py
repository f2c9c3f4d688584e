"""Event stream of the daemon: any part publishes, dashboards and `-f` commands subscribe."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

# A reader that reconnects within this many events misses nothing.
_REMEMBERED = 512
# A reader that is this far behind is cut off and has to reconnect: one slow page must not grow the daemon.
_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `type` is dotted (`request.finished`, `model.ready`); `data` becomes a JSON object."""

    id: int
    type: str
    data: dict[str, Any]


class Events:
    """Publisher with any number of subscribers. Use it only from the daemon's event loop."""

    def __init__(self) -> None:
        self._next_id = 1
        self._recent: deque[Event] = deque(maxlen=_REMEMBERED)
        self._queues: list[asyncio.Queue[Event | None]] = []
        self.on_subscribe: Callable[[], None] = lambda: None
        """Called when a subscription begins."""
        self.on_publish: Callable[[str, dict[str, Any]], object] = lambda *_: None
        """Called at once with every event, even without subscribers."""

    @property
    def subscribers(self) -> int:
        return len(self._queues)

    def publish(self, kind: str, data: dict[str, Any], *, remember: bool = True) -> None:
        """Send an event to every subscriber. `remember=False` keeps it out of the replay buffer, for events
        that a newer one replaces.
        """
        self.on_publish(kind, data)
        event = Event(self._next_id, kind, data)
        self._next_id += 1
        if remember:
            self._recent.append(event)
        for queue in self._queues:
            if queue.qsize() < _BACKLOG:
                queue.put_nowait(event)
            elif queue.qsize() == _BACKLOG:
                queue.put_nowait(None)

    async def subscribe(self, last_event_id: int | None = None) -> AsyncGenerator[Event, None]:
        """Yield events from now on. With `last_event_id`, first yield the remembered events after it."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        missed = [] if last_event_id is None else [e for e in self._recent if e.id > last_event_id]
        self._queues.append(queue)
        self.on_subscribe()
        try:
            for event in missed:
                yield event
            while (event_or_end := await queue.get()) is not None:
                yield event_or_end
        finally:
            self._queues.remove(queue)

    def close(self) -> None:
        """End every subscription."""
        for queue in self._queues:
            queue.put_nowait(None)
