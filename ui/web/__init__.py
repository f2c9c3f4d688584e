"""Admin panel: pages rendered on the server, and live updates: the fragments of a page are rendered at every
tick and sent where they changed.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from litestar import Router, get
from litestar.params import FromPath
from litestar.types import ControllerRouterHandler

from llmbox.app.errors import ApiError
from llmbox.app.http.auth.guard import Access, identity_of
from llmbox.app.http.server.request import handlers_of
from llmbox.app.http.server.sse import EventStreamResponse, SseOptions

from .pages import adapters, keys, model_detail, models, overview, requests, settings, system
from .render import PageContext, PanelRequest, panel_of, show_error, static_file

Pieces = Callable[[PageContext], Awaitable[dict[str, str]]]
"""Fragments of a page: HTML by the name in the page's `sse-swap`."""

VIEWS: Final[dict[str, Pieces]] = {
    "first-run": overview.first_run_pieces,
    "overview": overview.overview_pieces,
    "models": models.models_pieces,
    "activity": models.activity_pieces,
    "adapters": adapters.adapters_pieces,
    "memory": overview.memory_pieces,
}
SHORTEST_S: Final = 0.25
"""Seconds between two updates: a thousand requests a second must not become a thousand pages a second."""
OPTIONS = SseOptions(endless=True, last=b"")


@get("/live/{view:str}", sync_to_thread=False, name="panel_live")
def live(request: PanelRequest, view: FromPath[str]) -> EventStreamResponse:
    """Stream the fragments of a page. The filters are those of the Requests page, taken from its URL."""
    pieces = VIEWS.get(view)
    if view == "requests":
        pieces = requests.requests_pieces(requests.filter_of(request))
    if pieces is None:
        raise ApiError(404, "There is no live view of that name.", "not_found")
    panel = panel_of(request)
    identity = identity_of(request)
    valid = lambda: panel.services.security.is_valid(identity)  # noqa: E731
    return EventStreamResponse(_frames(panel, pieces, valid), OPTIONS)


async def _frames(
    panel: PageContext, pieces: Pieces, valid: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """Yield changed fragments until the reader signs out.

    An event that comes too soon after the last update waits for the next tick.
    """
    sent: dict[str, str] = {}
    last = 0.0
    async for event in panel.services.events.subscribe():
        if not valid():
            return
        now = time.monotonic()
        if event.type == "log" or (event.type != "tick" and now - last < SHORTEST_S):
            continue
        last = now
        for name, html in (await pieces(panel)).items():
            if sent.get(name) != html:
                sent[name] = html
                yield _frame(name, html)


def _frame(name: str, html: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in html.splitlines())
    return f"event: {name}\n{lines}\n".encode()


panel_routes: list[ControllerRouterHandler] = [
    Router(
        "/admin",
        route_handlers=[
            live,
            *handlers_of(adapters, keys, model_detail, models, overview, requests, settings, system),
        ],
        opt={"access": Access.PAGE, "form": True},
        exception_handlers={Exception: show_error},
        include_in_schema=False,
    ),
    static_file,
]


__all__ = ["panel_routes"]
