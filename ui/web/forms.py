"""What answers a form: a sentence in the page where scripts run, a redirect or an error page where not."""

from typing import Any

from litestar import MediaType, Request, Response
from litestar.datastructures import State

from llmbox.app.http.server.errors import answer, to_api_error

from .render import PanelRequest, page, panel_of, render


def is_fragment(request: Request[Any, Any, State]) -> bool:
    """Whether htmx asks: it puts the answer into the page that is open."""
    return "hx-request" in request.headers


def done(request: PanelRequest, back: str, said: str) -> Response[str]:
    """After a change. `back` is where a browser without scripts goes."""
    if is_fragment(request):
        html = render("live/said.html", panel_of(request), said=said, failed=False)
        return Response(html, media_type=MediaType.HTML)
    return Response("", status_code=303, headers={"Location": back}, media_type=MediaType.HTML)


def show_error(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Errors for people. Those of the guard lead to the sign-in, as everywhere."""
    plain = answer(request, error)  # also logs what is our fault
    told = to_api_error(error)
    if told.status in {303, 401} or "identity" not in request.scope["state"]:
        return plain
    headers = dict(told.headers)
    if is_fragment(request):
        html = render("live/said.html", panel_of(request), said=told.message, failed=True)
        headers |= {"HX-Retarget": "#said", "HX-Reswap": "innerHTML"}
        return Response(html, status_code=told.status, headers=headers, media_type=MediaType.HTML)
    shown = page(request, "error.html", "", told.status, error=told)
    shown.headers.update(headers)
    return shown
