"""Models that are not here yet: search with a fit before any download, and downloads on their way."""

from litestar import Response, get, post
from litestar.params import FromPath, FromQuery

from llmbox.app.errors import ApiError
from llmbox.app.http.forms import form_of
from llmbox.app.hub.errors import HubError

from .forms import done
from .render import Panel, PanelRequest, page, panel_of, render

ACTIVITY = "/admin/models/activity"
HITS = 20


@get("/models/discover", name="panel_discover")
async def discover_page(request: PanelRequest, text: FromQuery[str] = "") -> Response[str]:
    hits, problem = [], ""
    if text.strip():
        try:
            hits = await panel_of(request).control.library.search(text.strip(), HITS)
        except HubError as error:
            problem = " ".join(part for part in (f"{error.what}: {error.why}.", error.fix) if part)
    return page(request, "discover.html", "models", text=text, hits=hits, problem=problem)


@get("/models/activity", sync_to_thread=False, name="panel_activity")
def activity_page(request: PanelRequest) -> Response[str]:
    return page(request, "activity.html", "models", downloads=downloads_of(panel_of(request)))


async def activity_pieces(panel: Panel) -> dict[str, str]:
    return {"downloads": render("live/downloads.html", panel, downloads=downloads_of(panel))}


@post("/models/pull", status_code=200, name="panel_pull")
async def pull(request: PanelRequest) -> Response[str]:
    form = await form_of(request)
    name = form.get("model", "").strip()
    panel_of(request).control.library.downloads.start(name, anyway=bool(form.get("anyway")))
    return done(request, ACTIVITY, f"Downloading {name}: see Activity.")


@post("/models/download/{what:str}", status_code=200, name="panel_download")
async def change_download(request: PanelRequest, what: FromPath[str]) -> Response[str]:
    downloads = panel_of(request).control.library.downloads
    name = (await form_of(request)).get("model", "")
    if what == "pause":
        downloads.pause(name)
    elif what == "resume":
        downloads.resume(name)
    elif what == "cancel":
        await downloads.cancel(name)
    elif what == "dismiss":
        await downloads.dismiss(name)
    else:
        raise ApiError(404, "Downloads can be paused, resumed, cancelled and dismissed.", "not_found")
    said = {
        "pause": "Paused",
        "resume": "Going on with",
        "cancel": "Cancelled",
        "dismiss": "Took off the list:",
    }[what]
    return done(request, ACTIVITY, f"{said} {name}.")


def downloads_of(panel: Panel) -> list[dict[str, object]]:
    """Newest first."""
    return [each.as_dict(with_files=False) for each in reversed(panel.control.library.downloads.all())]
