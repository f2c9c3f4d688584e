"""Playground page: one or two models side by side. Its script uses the same API as every client."""

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
"""(API field, label, initial value) of each number. Empty fields are left to the model."""
MISSING: Final = (
    ("JSON schemas", "not available on this page; the API takes response_format"),
    ("Tools", "not available on this page; the API takes them"),
)
"""(name, reason) of features that this page lacks."""


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
