"""The event feed for dashboards and `-f` commands."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Request, get
from litestar.datastructures import State

from ...errors import ApiError
from ...events import Event, Events
from ...services import Services
from ..sse import EventStreamResponse, StreamOptions

OPTIONS = StreamOptions(endless=True, last=b"")


@get("/events", sync_to_thread=False, name="admin_events")
def events(request: Request[Any, Any, State]) -> EventStreamResponse:
    """From now on, or from after the event that `Last-Event-ID` names."""
    services: Services = request.app.state.services
    return EventStreamResponse(_frames(services.events, _last_id(request)), OPTIONS)


async def _frames(feed: Events, last: int | None) -> AsyncGenerator[bytes, None]:
    async for event in feed.subscribe(last):
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
