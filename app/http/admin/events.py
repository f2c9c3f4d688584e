"""The event feed for dashboards and `-f` commands."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from litestar import Request, get
from litestar.datastructures import State

from ...errors import ApiError
from ...events import Event, Events
from ...services import Services
from ..credentials import identity_of
from ..sse import EventStreamResponse, StreamOptions

OPTIONS = StreamOptions(endless=True, last=b"")


@get("/events", sync_to_thread=False, name="admin_events")
def events(request: Request[Any, Any, State]) -> EventStreamResponse:
    """From now on, or from after the event that `Last-Event-ID` names."""
    services: Services = request.app.state.services
    identity = identity_of(request)
    allowed = lambda: services.security.is_valid(identity)  # noqa: E731
    return EventStreamResponse(_frames(services.events, _last_id(request), allowed), OPTIONS)


async def _frames(feed: Events, last: int | None, allowed: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Ends when its reader signs out or the key is revoked: at the next event, a tick at the latest."""
    async with aclosing(feed.subscribe(last)) as subscription:
        async for event in subscription:
            if not allowed():
                return
            yield _frame(event)


def _frame(event: Event) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (
        event.id,
        event.type.encode(),
        msgspec.json.encode(event.data),
    )


def _last_id(request: Request[Any, Any, State]) -> int | None:
    text = request.headers.get("last-event-id")
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise ApiError(400, "Last-Event-ID must be a number.", "invalid_header", "Last-Event-ID")
    return int(text)
