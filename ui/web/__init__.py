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
from llmbox.app.http.server.sse import EventStreamResponse, SseOptions

from .pages import adapters
from .pages.adapters import adapters_pieces
from .pages.keys import add_key, change_limits, keys_page, revoke_key, rotate_key
from .pages.model_detail import add_alias, model_page, plan_piece, remove_alias, template_preview
from .pages.models import (
    activity_page,
    activity_pieces,
    change_download,
    chat_page,
    discover_page,
    load_model,
    models_page,
    models_pieces,
    pin_model,
    playground_page,
    pull,
    refresh_recommended,
    unload_model,
)
from .pages.overview import (
    first_run_page,
    first_run_pieces,
    memory_page,
    memory_pieces,
    overview_page,
    overview_pieces,
    telemetry_page,
    usage_piece,
)
from .pages.requests import (
    cancel_request,
    export_csv,
    export_json,
    filter_of,
    replay_request,
    request_page,
    requests_page,
    requests_pieces,
)
from .pages.settings import review_settings, save_settings, settings_page
from .pages.system import backup, bundle, check_update, checks_piece, purge, system_page
from .render import PageContext, PanelRequest, panel_of, show_error, static_file

Pieces = Callable[[PageContext], Awaitable[dict[str, str]]]
"""Fragments of a page: HTML by the name in the page's `sse-swap`."""

VIEWS: Final[dict[str, Pieces]] = {
    "first-run": first_run_pieces,
    "overview": overview_pieces,
    "models": models_pieces,
    "activity": activity_pieces,
    "adapters": adapters_pieces,
    "memory": memory_pieces,
}
SHORTEST_S: Final = 0.25
"""Seconds between two updates: a thousand requests a second must not become a thousand pages a second."""
OPTIONS = SseOptions(endless=True, last=b"")


@get("/live/{view:str}", sync_to_thread=False, name="panel_live")
def live(request: PanelRequest, view: FromPath[str]) -> EventStreamResponse:
    """Stream the fragments of a page. The filters are those of the Requests page, taken from its URL."""
    pieces = VIEWS.get(view)
    if view == "requests":
        pieces = requests_pieces(filter_of(request))
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
            activity_page,
            adapters.adapters_page,
            adapters.add,
            adapters.cancel,
            adapters.remove,
            add_alias,
            add_key,
            backup,
            bundle,
            cancel_request,
            change_download,
            change_limits,
            chat_page,
            check_update,
            checks_piece,
            discover_page,
            export_csv,
            export_json,
            keys_page,
            first_run_page,
            live,
            load_model,
            memory_page,
            model_page,
            models_page,
            overview_page,
            plan_piece,
            playground_page,
            pin_model,
            refresh_recommended,
            pull,
            purge,
            remove_alias,
            replay_request,
            request_page,
            requests_page,
            review_settings,
            revoke_key,
            rotate_key,
            save_settings,
            settings_page,
            system_page,
            telemetry_page,
            template_preview,
            unload_model,
            usage_piece,
        ],
        opt={"access": Access.PAGE, "form": True},
        exception_handlers={Exception: show_error},
        include_in_schema=False,
    ),
    static_file,
]


__all__ = ["panel_routes"]
