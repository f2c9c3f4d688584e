"""Try models, one or two side by side. The page's script talks to the same API as every client."""

from typing import Final

from litestar import Response, get
from litestar.params import FromQuery

from llmbox.app.http.admin.models import describe_all

from ..render import PanelRequest, page, panel_of

PARAMETERS: Final = (
    ("max_tokens", "Most tokens", "512"),
    ("temperature", "Temperature", ""),
    ("top_p", "Top p", ""),
    ("top_k", "Top k", ""),
    ("min_p", "Min p", ""),
    ("presence_penalty", "Presence penalty", ""),
    ("frequency_penalty", "Frequency penalty", ""),
    ("repetition_penalty", "Repetition penalty", ""),
    ("seed", "Seed", ""),
)
"""Numbers: field of the API, label, value at first. What is empty is left to the model."""
MISSING: Final = (
    ("JSON schemas", "this page has no place for them; the API takes response_format"),
    ("Tools", "this page has no place for them; the API takes them"),
)
"""(name, why) of what people may look for on this page."""


@get("/playground", sync_to_thread=False, name="panel_playground")
def playground_page(
    request: PanelRequest, model: FromQuery[str] = "", other: FromQuery[str] = ""
) -> Response[str]:
    panel = panel_of(request)
    ready = [each for each in describe_all(panel.control) if each.state in {"ready", "restarting"}]
    return page(
        request,
        "playground.html",
        "playground",
        models=ready,
        chosen=model,
        other=other,
        parameters=PARAMETERS,
        missing=MISSING,
        url=panel.control.running.url,
    )
