"""Try a model. The page's script talks to the same API as every client."""

from litestar import Response, get

from llmbox.app.http.admin.models import describe_all

from .render import PanelRequest, page, panel_of


@get("/playground", sync_to_thread=False, name="panel_playground")
def playground_page(request: PanelRequest, model: str = "") -> Response[str]:
    panel = panel_of(request)
    ready = [each for each in describe_all(panel.control) if each.state in {"ready", "restarting"}]
    return page(
        request, "playground.html", "playground", models=ready, chosen=model, url=panel.control.running.url
    )
