"""Responses to forms: a fragment for the open page where scripts run, otherwise a redirect or an error
page.
"""

from typing import Any

from litestar import MediaType, Request, Response
from litestar.datastructures import State

from llmbox.app.http.server.errors import answer, to_api_error

from .render import PanelRequest, page, panel_of, render


def is_fragment(request: Request[Any, Any, State]) -> bool:
    """Return whether htmx sent the request: it inserts the response into the open page."""
    return "hx-request" in request.headers


def done(request: PanelRequest, back: str, said: str) -> Response[str]:
    """Respond after a change. `back` is the page that a browser without scripts is sent to."""
    if is_fragment(request):
        html = render("live/said.html", panel_of(request), said=said, failed=False)
        return Response(html, media_type=MediaType.HTML)
    return Response("", status_code=303, headers={"Location": back}, media_type=MediaType.HTML)


def show_error(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Respond to an error with a page or a fragment. Errors of the auth guard redirect to the sign-in."""
    plain = answer(request, error)  # also logs server errors
    api_error = to_api_error(error)
    if api_error.status in {303, 401} or "identity" not in request.scope["state"]:
        return plain
    headers = dict(api_error.headers)
    if is_fragment(request):
        html = render("live/said.html", panel_of(request), said=api_error.message, failed=True)
        headers |= {"HX-Retarget": "#said", "HX-Reswap": "innerHTML"}
        return Response(html, status_code=api_error.status, headers=headers, media_type=MediaType.HTML)
    shown = page(request, "error.html", "", api_error.status, error=api_error)
    shown.headers.update(headers)
    return shown
